"""Transpose of codes and scales: one tile per program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.kernel import Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
)


@triton.jit
def transpose_kernel(
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
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
    store_quantised(q, scale, None, None, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, "qt")


class TritonTranspose(TileKernel):
    op = "transpose"

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return the best tile on an H200: it writes rows of 256 bytes where tiles are many."""
        if problem.m * problem.n >= 2**26:
            return TileConfig(256, 128, 16)
        return TileConfig(128, 128, 8) if problem.block == 128 else TileConfig(64, 128, 4)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        return (Launch(transpose_kernel, grid, problem, config),)


KERNELS = (TritonTranspose(),)
