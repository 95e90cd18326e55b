"""Quantise a float tensor per block with fallback: one tile per program, one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import block_reduce_amax, block_scales, spread, tile_codes
from jetfire.kernels_triton.halves import halvings, tile_amax, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
)

LARGEST = tl.constexpr(2.0**127)  # as in jetfire.reference.fallback_quantize


@triton.jit
def fallback_quantize_kernel(
    x_ptr,
    threshold_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    r_ptr,
    r_scale_ptr,
    r_t_ptr,
    r_scale_t_ptr,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    x = load_tile(x_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    amax = tile_amax(x, BLOCK, HALVINGS)
    x = widen(x)
    scale, multiplier = block_scales(amax)
    q = tile_codes(x, multiplier, 0, row0, col0, BLOCK, False)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )
    missed = x - q.to(tl.float32) * spread(scale, BLOCK)
    falls = (amax > tl.load(threshold_ptr)) & (amax < LARGEST)
    scale, multiplier = block_scales(tl.where(falls, block_reduce_amax(missed, BLOCK), 0.0))
    r = tile_codes(missed, multiplier, 0, row0, col0, BLOCK, False)
    store_quantised(
        r, scale, r_ptr, r_scale_ptr, r_t_ptr, r_scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )


class TritonFallbackQuantize(TileKernel):
    op = "fallback_quantize"

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return a tile of whose elements a thread has 16 to 32: it holds two numbers of each."""
        return TileConfig(128, 128, 16) if problem.block == 128 else TileConfig(64, 64, 8)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        given = {"HALVINGS": halvings(problem.block, config), **EXACT}
        return (Launch(fallback_quantize_kernel, grid, problem, config, **given),)


KERNELS = (TritonFallbackQuantize(),)
