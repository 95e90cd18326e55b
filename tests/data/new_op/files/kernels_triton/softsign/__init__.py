"""Softsign and its gradient on INT8 blocks: one tile per program, one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.kernels_triton.common import quantize_tile, spread
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.kernels_triton.tiles import (
    TILE_SPACE,
    TileConfig,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
    tile_reason,
)


@triton.jit
def load_values(
    q_ptr,
    scale_ptr,
    row0,
    col0,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a tile of codes times their scales."""
    q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    scale = load_tile(
        scale_ptr,
        row0 // BLOCK,
        col0 // BLOCK,
        tl.cdiv(M, BLOCK),
        tl.cdiv(N, BLOCK),
        scale_stride,
        TILE_M // BLOCK,
        TILE_N // BLOCK,
    )
    return q.to(tl.float32) * spread(scale, BLOCK)


@triton.jit
def softsign_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    x = load_values(
        x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
    )
    below = 1.0 + tl.abs(x)
    if BACKWARD:
        dy = load_values(
            dy_ptr,
            dy_scale_ptr,
            row0,
            col0,
            M,
            N,
            dy_stride,
            dy_scale_stride,
            TILE_M,
            TILE_N,
            BLOCK,
        )
        value = tl.div_rn(tl.div_rn(dy, below), below)
    else:
        value = tl.div_rn(x, below)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    q, scale = quantize_tile(value, seed, row0, col0, BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )


class TritonSoftsign(TritonKernel):
    op = "softsign"
    name = "triton"
    Config = TileConfig

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        return tile_reason(problem.m, problem.n, problem.block, config, device)

    def default(self, problem: Any, device: Device) -> TileConfig:
        return TileConfig(problem.block, 128, problem.block // 8)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return TILE_SPACE

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        x, x_scale = inputs["x"], inputs["x_scale"]
        dy, dy_scale = inputs.get("dy"), inputs.get("dy_scale")
        softsign_kernel[tile_grid(problem.m, problem.n, config)](
            x,
            x_scale,
            dy,
            dy_scale,
            outputs.get("q"),
            outputs.get("scale"),
            outputs.get("qt"),
            outputs.get("scale_t"),
            inputs.get("seed"),
            problem.m,
            problem.n,
            x.stride(0),
            x_scale.stride(0),
            0 if dy is None else dy.stride(0),
            0 if dy_scale is None else dy_scale.stride(0),
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            BLOCK=problem.block,
            LAYOUT=problem.layout,
            STOCHASTIC=problem.rounding == "stochastic",
            BACKWARD=problem.mode == "bwd",
            num_warps=config.warps,
            enable_fp_fusion=False,
        )


KERNELS = (TritonSoftsign(),)
