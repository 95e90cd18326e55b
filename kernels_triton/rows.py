"""Rows of a quantised matrix in plain Triton: their values, vectors along them, sums over them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.tensors import ceil_div
from jetfire.kernels_triton.common import spread
from jetfire.kernels_triton.kernel import Launch
from jetfire.kernels_triton.tiles import TileConfig, load_tile


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
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load dequantised values [R, C]: rows of one row of blocks, or whole rows of blocks."""
    q = load_tile(q_ptr, row0, col0, M, N, stride, R, C).to(tl.float32)
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    DOWN: tl.constexpr = (R + BLOCK - 1) // BLOCK
    scale = load_tile(
        scale_ptr, row0 // BLOCK, col0 // BLOCK, blocks_m, blocks_n, scale_stride, DOWN, C // BLOCK
    )
    if R >= BLOCK:
        wide = spread(scale, BLOCK)
    else:
        wide = tl.reshape(tl.broadcast_to(scale[:, :, None], (1, C // BLOCK, BLOCK)), (1, C))
    return q * wide


@triton.jit
def load_vector(ptr, places, size):
    """Load a number for each place of a row or a column, 0 beyond its end."""
    return tl.load(ptr + places, mask=places < size, other=0.0)


@triton.jit
def column_sums_kernel(part_ptr, out_ptr, parts, N, C: tl.constexpr):
    """Add up parts, in order, of part_ptr [parts, N]."""
    cols = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    at = part_ptr + cols
    for _ in range(parts):
        total += tl.load(at, mask=cols < N, other=0.0)
        at += N
    tl.store(out_ptr + cols, total, mask=cols < N)


def column_sums(problem: Any, config: TileConfig, name: str) -> Launch:
    """Return the launch that adds up an output's parts, one from each row of tiles."""
    return Launch(
        column_sums_kernel,
        (ceil_div(problem.n, 128),),
        problem,
        config,
        {"part_ptr": f"{name}_parts", "out_ptr": name},
        parts=ceil_div(problem.m, config.tile_m),
        C=128,
        num_warps=4,
    )
