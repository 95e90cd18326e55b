"""Quantise three matrices side by side: one tile of one of them per program, as `quantize` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import block_scales, tile_codes
from jetfire.kernels_triton.halves import halvings, tile_amax, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.quantize import TritonQuantize
from jetfire.kernels_triton.tiles import (
    RegisterConfig,
    grid_origin,
    load_tile,
    register_limit,
    store_quantised,
    tile_grid,
    tile_reason,
)


@triton.jit
def load_across(
    query_ptr,
    key_ptr,
    value_ptr,
    row0,
    col0,
    M,
    WIDTH,
    query_stride,
    key_stride,
    value_stride,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Load the R×C tile at (row0, col0) of [query | key | value], which may lie in two or three."""
    key0, value0 = col0 - WIDTH, col0 - 2 * WIDTH
    query = load_tile(query_ptr, row0, col0, M, WIDTH, query_stride, R, C)
    # Columns left of a part are masked like those beyond it.
    rows = row0 + tl.arange(0, R)
    cols = tl.arange(0, C)
    lines = rows.to(tl.int64)[:, None]
    key = tl.load(
        key_ptr + lines * key_stride + (key0 + cols)[None, :],
        other=0,
        mask=(rows < M)[:, None] & ((key0 + cols >= 0) & (key0 + cols < WIDTH))[None, :],
    )
    value = tl.load(
        value_ptr + lines * value_stride + (value0 + cols)[None, :],
        other=0,
        mask=(rows < M)[:, None] & ((value0 + cols >= 0) & (value0 + cols < WIDTH))[None, :],
    )
    part = ((col0 + cols) // WIDTH)[None, :]
    return tl.where(part == 0, query, tl.where(part == 1, key, value))


@triton.jit
def quantize_qkv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    WIDTH,
    query_stride,
    key_stride,
    value_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HALVINGS: tl.constexpr,
    WITHIN: tl.constexpr,
):
    """Quantise one tile of [query | key | value]; WITHIN: no tile lies in two of the three."""
    row0, col0 = grid_origin(TILE_M, TILE_N)
    if WITHIN:
        part = col0 // WIDTH
        ptr = query_ptr
        stride = query_stride
        if part == 1:
            ptr = key_ptr
            stride = key_stride
        elif part == 2:
            ptr = value_ptr
            stride = value_stride
        x = load_tile(ptr, row0, col0 - part * WIDTH, M, WIDTH, stride, TILE_M, TILE_N)
    else:
        x = load_across(
            query_ptr,
            key_ptr,
            value_ptr,
            row0,
            col0,
            M,
            WIDTH,
            query_stride,
            key_stride,
            value_stride,
            TILE_M,
            TILE_N,
        )
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    scale, multiplier = block_scales(tile_amax(x, BLOCK, HALVINGS))
    q = tile_codes(widen(x), multiplier, seed, row0, col0, BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, 3 * WIDTH, BLOCK, LAYOUT
    )


# A limit of `quantize`'s → the least, of 72 to 96, that spills nothing here.
_REGISTERS = {64: 80, 72: 96}


class TritonQuantizeQkv(TritonQuantize):
    """A kernel with `quantize`'s legality, default and space, for the matrix of all three."""

    op = "quantize_qkv"

    def legal(self, problem: Any, config: RegisterConfig, device: Device) -> str | None:
        return tile_reason(problem.m, 3 * problem.n, problem.block, config, device)

    def default(self, problem: Any, device: Device) -> RegisterConfig:
        """Return `quantize`'s default, with registers for three pointers where it sets a limit."""
        config = super().default(problem, device)
        return replace(config, registers=_REGISTERS.get(config.registers, config.registers))

    def launches(self, problem: Any, config: RegisterConfig, device: Device) -> tuple[Launch, ...]:
        width = problem.n
        given = {
            "WIDTH": width,
            "WITHIN": width % config.tile_n == 0,
            "HALVINGS": halvings(problem.block, config),
            **EXACT,
            **register_limit(config),
        }
        grid = tile_grid(problem.m, 3 * width, config)
        return (Launch(quantize_qkv_kernel, grid, problem, config, **given),)


KERNELS = (TritonQuantizeQkv(),)
