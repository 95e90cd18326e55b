"""LayerNorm's Triton kernel: configs, legality and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.kernels_triton.layernorm.backward import backward_kernel
from jetfire.kernels_triton.layernorm.forward import given_kernel, row_kernel
from jetfire.kernels_triton.tiles import device_reason
from jetfire.kernels_triton.workspace import counters
from jetfire.ops.device import Device
from jetfire.ops.op import Config, Kernel, Tensors, ceil_div


@dataclass(frozen=True)
class LayerNormConfig(Config):
    """How the two phases divide the matrix (`layernorm.tasks`).

    Attributes:
        tile_n: columns of a second-phase program.
        walk: rows of blocks that it works on, one below the other; these make a band.
        warps: warps a program.
        rows: rows that a first-phase program reduces.
        chunk: columns of them that it reads at a time.
        ahead: how many second-phase programs' worth of rows the first phase runs ahead.
        registers: the most that a thread may take; fewer let more programs run at once.
    """

    tile_n: int = 64
    walk: int = 1
    warps: int = 2
    rows: int = 8
    chunk: int = 512
    ahead: int = 1024
    registers: int = 255


SPACE: dict[str, Sequence[Any]] = {
    "tile_n": (32, 64, 128, 256),
    "walk": (1, 2, 4, 8),
    "warps": (1, 2, 4, 8, 16),
    "rows": (2, 4, 8, 16),
    "chunk": (128, 256, 512, 1024, 2048),
    "ahead": (256, 512, 1024, 2048, 4096),
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
        bands = ceil_div(problem.m, block * config.walk)
        tasks = ceil_div(problem.n, config.tile_n) + config.walk * block // config.rows
        if bands * tasks >= 2**31:
            return "2^31 programs or more: expected larger tiles"
        return None

    def default(self, problem: Any, device: Device) -> LayerNormConfig:
        block = problem.block
        if block == 128:
            return LayerNormConfig(tile_n=128, warps=8, chunk=1024)
        return LayerNormConfig(tile_n=64, warps=block // 32 * 2, chunk=512 if block == 64 else 256)

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
    statistics = inputs if problem.stats == "given" else outputs
    tensors = (
        x, x_scale, inputs["weight"], inputs["bias"], statistics["mean"], statistics["rstd"],
        inputs.get("seed"), *_quantised(outputs),
    )  # fmt: skip
    sizes = (problem.m, problem.n, x.stride(0), x_scale.stride(0))
    options = {**_options(problem, config), "WHOLE": problem.m % problem.block == 0}
    if problem.stats == "given":
        given_kernel[(bands * across,)](*tensors, *sizes, **options)
        return
    first = config.walk * problem.block // config.rows
    row_kernel[(bands * (across + first),)](
        *tensors, counters(x.device, 1 + bands), *sizes, problem.eps, lead,
        ROWS=config.rows, CHUNK=config.chunk, **options,
        WORDS=problem.n % 4 == 0 and x.stride(0) % 4 == 0 and x.data_ptr() % 4 == 0,
    )  # fmt: skip


def _backward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, dy, dy_scale = (inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
    bands, across, lead = _bands(problem, config)
    quads = torch.empty((problem.m, 4), device=x.device)
    partial = torch.empty((2, bands, problem.n), device=x.device)
    first = config.walk * problem.block // config.rows
    backward_kernel[(bands * (across + first),)](
        x, x_scale, dy, dy_scale, inputs["weight"], inputs["mean"], inputs["rstd"], quads,
        inputs.get("seed"), *_quantised(outputs), outputs["dweight"], outputs["dbias"], partial,
        counters(x.device, 1 + bands + across), problem.m, problem.n,
        x.stride(0), x_scale.stride(0), dy.stride(0), dy_scale.stride(0), lead,
        ROWS=config.rows, CHUNK=config.chunk, WHOLE=problem.n % config.tile_n == 0,
        **_options(problem, config),
    )  # fmt: skip
