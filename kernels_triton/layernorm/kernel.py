"""LayerNorm's Triton kernel: configs, legality and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetfire.kernels_triton.layernorm.backward import backward_kernel
from jetfire.kernels_triton.layernorm.forward import given_kernel, row_kernel
from jetfire.kernels_triton.tiles import TILE_SPACE, TileConfig, tile_reason
from jetfire.kernels_triton.workspace import counters
from jetfire.ops.device import Device
from jetfire.ops.op import Kernel, Tensors, ceil_div


@dataclass(frozen=True)
class LayerNormConfig(TileConfig):
    """Tiles as `TileConfig` has them, and the phase that reduces whole rows before them.

    Attributes:
        rows: rows that a first-phase program reduces.
        chunk: columns of them that it reads at a time.
        walk: tiles that a second-phase program of backward walks down, adding up its columns.
        ahead: how many tiles' worth of rows the first phase runs ahead of the second.
    """

    rows: int = 8
    chunk: int = 1024
    walk: int = 1
    ahead: int = 1024


class TritonLayerNorm(Kernel):
    op = "layernorm"
    name = "triton"
    Config = LayerNormConfig

    def legal(self, problem: Any, config: LayerNormConfig, device: Device) -> str | None:
        m, n, block = problem.m, problem.n, problem.block
        if (reason := tile_reason(m, n, block, config, device)) is not None:
            return reason
        if config.rows & (config.rows - 1) or config.rows > block:
            return f"rows={config.rows}: expected a power of two up to block={block}"
        if config.chunk & (config.chunk - 1) or config.chunk < block:
            return f"chunk={config.chunk}: expected a power of two of at least block={block}"
        if config.rows * config.chunk > 64 * 32 * config.warps:
            return f"rows·chunk={config.rows * config.chunk}: expected at most 64 a thread"
        if config.tile_n > 2048:
            return f"tile_n={config.tile_n}: expected at most 2048"
        tasks = ceil_div(n, config.tile_n) + config.walk * config.tile_m // config.rows
        if ceil_div(m, config.tile_m) * tasks >= 2**31:
            return "more than 2^31 programs: expected larger tiles"
        return None

    def default(self, problem: Any, device: Device) -> LayerNormConfig:
        tile = max(problem.block, 64)
        return LayerNormConfig(tile, tile, 4 if tile == 64 else 8, chunk=512)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        space = {**TILE_SPACE, "rows": (4, 8, 16, 32), "chunk": (256, 512, 1024, 2048)}
        space["ahead"] = (256, 512, 1024, 2048, 4096)
        if problem.mode == "bwd":
            space["walk"] = (1, 2, 4, 8)
        return space

    def launch(
        self, problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        (_backward if problem.mode == "bwd" else _forward)(problem, config, inputs, outputs)


def _options(problem: Any, config: LayerNormConfig) -> dict[str, Any]:
    return {
        "TILE_M": config.tile_m, "TILE_N": config.tile_n, "BLOCK": problem.block,
        "LAYOUT": problem.layout, "STOCHASTIC": problem.rounding == "stochastic",
        "num_warps": config.warps,
    }  # fmt: skip


def _quantised(outputs: Tensors) -> list[torch.Tensor | None]:
    return [outputs.get(name) for name in ("q", "scale", "qt", "scale_t")]


def _lead(bands: int, across: int, config: LayerNormConfig) -> int:
    """How many bands the first phase runs ahead."""
    return min(bands, ceil_div(config.ahead, across * config.walk))


def _forward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale = inputs["x"], inputs["x_scale"]
    bands, across = ceil_div(problem.m, config.tile_m), ceil_div(problem.n, config.tile_n)
    statistics = inputs if problem.stats == "given" else outputs
    tensors = (
        x, x_scale, inputs["weight"], inputs["bias"], statistics["mean"], statistics["rstd"],
        inputs.get("seed"), *_quantised(outputs),
    )  # fmt: skip
    sizes = (problem.m, problem.n, x.stride(0), x_scale.stride(0))
    options = {**_options(problem, config), "WHOLE": problem.m % config.tile_m == 0}
    if problem.stats == "given":
        given_kernel[(bands * across,)](*tensors, *sizes, **options)
        return
    row_kernel[(bands * (across + config.tile_m // config.rows),)](
        *tensors, counters(x.device, 1 + bands), *sizes, problem.eps,
        _lead(bands, across, config), ROWS=config.rows, CHUNK=config.chunk, **options,
    )  # fmt: skip


def _backward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, dy, dy_scale = (inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
    height = config.tile_m * config.walk
    bands, across = ceil_div(problem.m, height), ceil_div(problem.n, config.tile_n)
    sums = torch.empty((2, problem.m), device=x.device)
    partial = torch.empty((2, bands, problem.n), device=x.device)
    backward_kernel[(bands * (across + height // config.rows),)](
        x, x_scale, dy, dy_scale, inputs["weight"], inputs["mean"], inputs["rstd"], sums,
        inputs.get("seed"), *_quantised(outputs), outputs["dweight"], outputs["dbias"], partial,
        counters(x.device, 1 + bands + across), problem.m, problem.n,
        x.stride(0), x_scale.stride(0), dy.stride(0), dy_scale.stride(0),
        _lead(bands, across, config), ROWS=config.rows, CHUNK=config.chunk, WALK=config.walk,
        WHOLE=problem.n % config.tile_n == 0, **_options(problem, config),
    )  # fmt: skip
