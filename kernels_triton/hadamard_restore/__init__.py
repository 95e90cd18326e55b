"""Hadamard restoring: a transform is a product of integers; one tile per program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import (
    block_reduce_amax,
    block_scales,
    hadamard,
    tile_codes,
)
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
    warps_reason,
)
from jetfire.reference.hadamard import factor

# Columns of a tile's transform: with 256 a program takes up to 128 KiB, and an SM of sm_89 has 99.
LARGEST = 128


@triton.jit
def hadamard_restore_kernel(
    wide_ptr,
    step_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    stride,
    factor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write a tile's codes, n×m; SIZE columns are transformed by one product, or by several."""
    row0, col0 = grid_origin(TILE_M, TILE_N)
    if GROUP <= TILE_N:
        codes = load_tile(wide_ptr, row0, col0, M, N, stride, TILE_M, TILE_N) >> 4
        t = tl.dot(tl.reshape(codes, (TILE_M * TILE_N // SIZE, SIZE)), hadamard(0, 0, SIZE, GROUP))
        t = tl.reshape(t, (TILE_M, TILE_N))
    else:
        first = col0 // GROUP * GROUP
        t = tl.zeros((TILE_M, TILE_N), tl.int32)
        for start in range(0, GROUP, TILE_N):
            codes = load_tile(wide_ptr, row0, first + start, M, N, stride, TILE_M, TILE_N) >> 4
            t += tl.dot(codes, hadamard(start, col0 - first, TILE_N, GROUP))
    x = t.to(tl.float32)
    scale, multiplier = block_scales(block_reduce_amax(x, BLOCK))
    q = tile_codes(x, multiplier, 0, row0, col0, BLOCK, False)
    scale *= tl.load(step_ptr) * factor
    store_quantised(q, scale, None, None, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, "qt")


class TritonHadamardRestore(TileKernel):
    op = "hadamard_restore"

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        """Refuse a transform without room in shared memory, and 32 warps.

        They leave each thread 64 registers, and a product may take 94 at the least.
        """
        if min(problem.group, config.tile_n) > LARGEST:
            given = f"tile_n={config.tile_n} group={problem.group}"
            return f"{given}: expected one of the two to be at most {LARGEST}"
        return warps_reason(config) or super().legal(problem, config, device)

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return a tile of whose elements a thread has 32, as quantising ones do."""
        return TileConfig(128, 128, 16) if problem.block == 128 else TileConfig(64, 128, 8)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        # A product takes at least 32 columns.
        given = {"factor": factor(problem.group), "SIZE": max(32, problem.group)}
        return (Launch(hadamard_restore_kernel, grid, problem, config, **given, **EXACT),)


KERNELS = (TritonHadamardRestore(),)
