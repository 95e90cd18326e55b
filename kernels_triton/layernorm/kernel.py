"""LayerNorm's Triton kernel: configs, legality and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.kernels_triton.layernorm.backward import backward_kernel, gradient_kernel, sums_kernel
from jetfire.kernels_triton.layernorm.forward import given_kernel, row_kernel, statistics_kernel
from jetfire.kernels_triton.tiles import device_reason
from jetfire.kernels_triton.workspace import counters
from jetfire.ops.device import Device
from jetfire.ops.op import Config, Kernel, Tensors, ceil_div


@dataclass(frozen=True)
class LayerNormConfig(Config):
    """How the two phases divide the matrix (`layernorm.tasks`); with statistics given, the second.

    Attributes:
        tile_n: columns of a second-phase program.
        walk: rows of blocks that it works on, one below the other; these make a band.
        warps: warps a program.
        rows: rows that a first-phase program reduces.
        chunk: columns of them that it reads at a time.
        ahead: how many second-phase programs' worth of rows the first phase runs ahead.
        stages: how many chunks are on their way at once.
        launches: 1: both phases in one, as `tasks` orders them; 2: one after the other.
        registers: the most that a thread may take; fewer let more programs run at once.
    """

    tile_n: int = 64
    walk: int = 1
    warps: int = 2
    rows: int = 8
    chunk: int = 512
    ahead: int = 1024
    stages: int = 3
    launches: int = 1
    registers: int = 255


SPACE: dict[str, Sequence[Any]] = {
    "tile_n": (32, 64, 128, 256),
    "walk": (1, 2, 4, 8),
    "warps": (1, 2, 4, 8, 16),
    "rows": (2, 4, 8, 16),
    "chunk": (128, 256, 512, 1024, 2048),
    "ahead": (256, 512, 1024, 2048, 4096),
    "stages": (1, 2, 3, 4),
    "launches": (1, 2),
    "registers": (64, 96, 128, 168, 255),
}


def vector(problem: Any) -> int:
    """Columns of a thread: eight share a Philox call, sixteen make the widest load."""
    return 8 if problem.rounding == "stochastic" or problem.mode == "bwd" else 16


class TritonLayerNorm(Kernel):
    op = "layernorm"
    name = "triton"
    Config = LayerNormConfig

    def legal(self, problem: Any, config: LayerNormConfig, device: Device) -> str | None:
        if (reason := device_reason(device)) is not None:
            return reason
        block, lanes = problem.block, 32 * config.warps
        for name in ("tile_n", "walk", "warps", "rows", "chunk"):
            value = getattr(config, name)
            if value & (value - 1):
                return f"{name}={value}: expected a power of two"
        if config.launches > 2:
            return f"launches={config.launches}: expected 1 or 2"
        if not 32 <= config.registers <= 255:
            return f"registers={config.registers}: expected 32 to 255"
        if config.warps > 16:
            return f"warps={config.warps}: expected at most 16"
        if not block <= config.tile_n <= 2048:
            return f"tile_n={config.tile_n}: expected block={block} to 2048"
        high = block * config.tile_n // (lanes * vector(problem))
        if not 1 <= high <= min(block, 16):
            return f"{high} rows of a block a thread: expected 1 to {min(block, 16)}"
        if config.rows > block:
            return f"rows={config.rows}: expected at most block={block}"
        if not block <= config.chunk <= 64 * lanes // config.rows:
            return f"chunk={config.chunk}: expected block={block} to 64·lanes/rows"
        shared = config.stages * config.rows * config.chunk * (2 if problem.mode == "bwd" else 1)
        if device.shared_bytes and shared > device.shared_bytes - 16384:
            return f"stages={config.stages}: {shared} bytes of shared memory for chunks"
        bands = ceil_div(problem.m, block * config.walk)
        tasks = ceil_div(problem.n, config.tile_n) + config.walk * block // config.rows
        if bands * tasks >= 2**31:
            return "2^31 programs or more: expected larger tiles"
        return None

    def default(self, problem: Any, device: Device) -> LayerNormConfig:
        warps = {32: 2, 64: 4, 128: 8}[problem.block]
        if problem.mode == "fwd":
            return LayerNormConfig(128, 1, warps, rows=4, chunk=256 * warps, launches=2)
        tile_n, walk = max(problem.block, 64), 256 // problem.block
        return LayerNormConfig(tile_n, walk, warps, rows=8, chunk=128 * warps, launches=2)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def launch(
        self, problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        (_backward if problem.mode == "bwd" else _forward)(problem, config, inputs, outputs)


def _options(problem: Any, config: LayerNormConfig) -> dict[str, Any]:
    vec = vector(problem)
    return {
        "COUNT": config.tile_n // problem.block, "WALK": config.walk, "VEC": vec,
        "H": problem.block * config.tile_n // (32 * config.warps * vec),
        "BLOCK": problem.block, "LAYOUT": problem.layout,
        "STOCHASTIC": problem.rounding == "stochastic", "num_warps": config.warps,
        "maxnreg": min(config.registers, 65536 // (32 * config.warps)),
    }  # fmt: skip


def _first(config: LayerNormConfig) -> dict[str, Any]:
    return {"ROWS": config.rows, "CHUNK": config.chunk, "STAGES": config.stages}


def _quantised(outputs: Tensors) -> list[torch.Tensor | None]:
    return [outputs.get(name) for name in ("q", "scale", "qt", "scale_t")]


def _bands(problem: Any, config: LayerNormConfig) -> tuple[int, int, int]:
    """Bands, second-phase programs of one, and how many bands the first phase runs ahead."""
    bands = ceil_div(problem.m, problem.block * config.walk)
    across = ceil_div(problem.n, config.tile_n)
    return bands, across, min(bands, ceil_div(config.ahead, across))


def _forward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale = inputs["x"], inputs["x_scale"]
    bands, across, lead = _bands(problem, config)
    given = problem.stats == "given"
    source = inputs if given else outputs
    statistics = (source["mean"], source["rstd"])
    tensors = (
        x, x_scale, inputs["weight"], inputs["bias"], *statistics, inputs.get("seed"),
        *_quantised(outputs),
    )  # fmt: skip
    sizes = (problem.m, problem.n, x.stride(0), x_scale.stride(0))
    options = {**_options(problem, config), "WHOLE": problem.m % problem.block == 0}
    words = problem.n % 4 == 0 and x.stride(0) % 4 == 0 and x.data_ptr() % 4 == 0
    if not given and config.launches == 1:
        programs = bands * (across + config.walk * problem.block // config.rows)
        row_kernel[(programs,)](
            *tensors, counters(x.device, 1 + bands), *sizes, problem.eps, lead, WORDS=words,
            **_first(config), **options,
        )  # fmt: skip
        return
    if not given:
        statistics_kernel[(ceil_div(problem.m, config.rows),)](
            x, x_scale, *statistics, *sizes, problem.eps, BLOCK=problem.block, WORDS=words,
            **_first(config), num_warps=config.warps,
        )  # fmt: skip
    given_kernel[(bands * across,)](*tensors, *sizes, UPWARDS=not given, **options)


def _backward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    codes = tuple(inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
    weight, mean, rstd = (inputs[name] for name in ("weight", "mean", "rstd"))
    bands, across, lead = _bands(problem, config)
    quads = torch.empty((problem.m, 4), device=weight.device)
    partial = torch.empty((2, bands, problem.n), device=weight.device)
    results = (
        inputs.get("seed"), *_quantised(outputs), outputs["dweight"], outputs["dbias"], partial,
        counters(weight.device, across + 1 + bands),
    )  # fmt: skip
    sizes = (problem.m, problem.n, *(tensor.stride(0) for tensor in codes))
    options = {**_options(problem, config), "WHOLE": problem.n % config.tile_n == 0}
    if config.launches == 1:
        programs = bands * (across + config.walk * problem.block // config.rows)
        backward_kernel[(programs,)](
            *codes, weight, mean, rstd, quads, *results, *sizes, lead, **_first(config), **options
        )
        return
    sums_kernel[(ceil_div(problem.m, config.rows),)](
        *codes, weight, mean, rstd, quads, *sizes, BLOCK=problem.block, **_first(config),
        num_warps=config.warps,
    )  # fmt: skip
    gradient_kernel[(bands * across,)](*codes, weight, quads, *results, *sizes, **options)
