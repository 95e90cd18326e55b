"""Quantise a float tensor per block: one tile per program, one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import block_scales, tile_codes
from jetfire.kernels_triton.halves import halvings, tile_amax, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    REGISTER_SPACE,
    RegisterConfig,
    TileKernel,
    grid_origin,
    load_tile,
    register_limit,
    store_quantised,
    tile_grid,
)


@triton.jit
def quantize_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    x = load_tile(x_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    scale, multiplier = block_scales(tile_amax(x, BLOCK, HALVINGS))
    q = tile_codes(widen(x), multiplier, seed, row0, col0, BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )


class TritonQuantize(TileKernel):
    op = "quantize"
    Config = RegisterConfig
    choices = REGISTER_SPACE

    def default(self, problem: Any, device: Device) -> RegisterConfig:
        """Return the best tile measured on an H200 at 8192×4096 and 8192×16384."""
        block, stochastic = problem.block, problem.rounding == "stochastic"
        if problem.dtype == "fp32":  # twice the registers per tile
            return RegisterConfig(128, 128, 16) if block == 128 else RegisterConfig(64, 64, 4)
        if block == 128:
            # 64 registers let four programs share an SM, where the 128 of stochastic rounding
            # leave two: 29.4 µs, not 32.6. Transposing too needs more, and spills below 80.
            limited = stochastic and problem.layout == "q"
            return RegisterConfig(128, 128, 8, 64 if limited else 255)
        if problem.layout == "both":
            return RegisterConfig(64, 128, 4)
        if problem.layout == "qt":
            return RegisterConfig(64, 128, 4) if stochastic else RegisterConfig(64, 256, 8)
        if stochastic:
            return RegisterConfig(32, 128, 2) if block == 32 else RegisterConfig(64, 64, 2, 72)
        return RegisterConfig(64, 64, 4)

    def launches(self, problem: Any, config: RegisterConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        given = {"HALVINGS": halvings(problem.block, config), **EXACT, **register_limit(config)}
        return (Launch(quantize_kernel, grid, problem, config, **given),)


KERNELS = (TritonQuantize(),)
