"""Softsign and its gradient on INT8 blocks: one tile per program, one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import quantize_tile, spread
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
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


class TritonSoftsign(TileKernel):
    op = "softsign"

    def default(self, problem: Any, device: Device) -> TileConfig:
        return TileConfig(problem.block, 128, problem.block // 8)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        return (Launch(softsign_kernel, grid, problem, config, **EXACT),)


KERNELS = (TritonSoftsign(),)
