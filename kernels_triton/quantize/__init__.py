"""Quantise a float tensor per block: one tile a program, one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jetfire.kernels_triton.common import quantize_tile
from jetfire.kernels_triton.tiles import (
    TILE_SPACE,
    TileConfig,
    load_tile,
    store_quantised,
    tile_origin,
    tile_reason,
)
from jetfire.ops.device import Device
from jetfire.ops.op import Kernel, Tensors, ceil_div


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, seed_ptr, M, N, stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    x = load_tile(x_ptr, row0, col0, M, N, stride, TILE_M, TILE_N).to(tl.float32)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    q, scale = quantize_tile(x, seed, row0, col0, BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )


class TritonQuantize(Kernel):
    op = "quantize"
    name = "triton"
    Config = TileConfig

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        return tile_reason(problem.m, problem.n, problem.block, config, device)

    def default(self, problem: Any, device: Device) -> TileConfig:
        tile = max(problem.block, 64)
        return TileConfig(tile, tile, 4 if tile == 64 else 8)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return TILE_SPACE

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        x = inputs["x"]
        tiles = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        quantize_kernel[(tiles,)](
            x, outputs.get("q"), outputs.get("scale"), outputs.get("qt"), outputs.get("scale_t"),
            inputs.get("seed"), problem.m, problem.n, x.stride(0),
            TILE_M=config.tile_m, TILE_N=config.tile_n, BLOCK=problem.block,
            LAYOUT=problem.layout, STOCHASTIC=problem.rounding == "stochastic",
            num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip


KERNELS = (TritonQuantize(),)
