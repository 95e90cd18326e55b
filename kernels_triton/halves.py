"""Magnitudes of 16-bit floats, compared two at a time; their widening without shuffles of halves.

A tile stays packed until its scale is known, so a thread holds two elements per register while
it waits: 60 registers at 64 elements per thread, where converting first takes 92.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import INTERPRETED, block_reduce_amax, max_nan, to_float
from jetfire.kernels_triton.tiles import TileConfig

VECTOR = tl.constexpr(16)  # neighbours in a row that a thread has
_MAX_BF16 = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")
_MAX_FP16 = tl.constexpr("max.NaN.f16x2 $0, $1, $2;")
_MAX_ABS_BF16 = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $1, 0x7fff7fff;
and.b32 b, $2, 0x7fff7fff;
max.NaN.bf16x2 $0, a, b;
}""")
_MAX_ABS_FP16 = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $1, 0x7fff7fff;
and.b32 b, $2, 0x7fff7fff;
max.NaN.f16x2 $0, a, b;
}""")
_WIDEN_BF16 = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")


@triton.jit
def widen(x):
    """Convert a float tile to fp32: one instruction per element."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        _WIDEN_BF16, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def narrow(x):
    """Convert an fp32 tile to bf16, two neighbours at a time: LLVM converts each alone."""
    if INTERPRETED:
        return to_float(x, tl.bfloat16)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _pairs(asm: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@triton.jit
def _halve(x, asm: tl.constexpr):
    """Combine the upper half of each block's rows with the lower: [K, B, C] → [K, B/2, C]."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
    low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    return _pairs(asm, low, high)


@triton.jit
def tile_amax(x, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """Return max|x| of each block of a float tile, fp32: [R, C] → [R/BLOCK, C/BLOCK].

    It is NaN or ∞ where a block holds NaN. `HALVINGS` row halvings are done packed, in registers.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if INTERPRETED or HALVINGS == 0 or x.dtype == tl.float32:
        return block_reduce_amax(widen(x), BLOCK)
    bf16: tl.constexpr = x.dtype == tl.bfloat16
    blocks = tl.reshape(x, (R // BLOCK, BLOCK, C))
    blocks = _halve(blocks, _MAX_ABS_BF16 if bf16 else _MAX_ABS_FP16)
    for _ in tl.static_range(HALVINGS - 1):
        blocks = _halve(blocks, _MAX_BF16 if bf16 else _MAX_FP16)
    rows: tl.constexpr = blocks.shape[1]
    wide = tl.reshape(widen(blocks), (R // BLOCK, rows, C // BLOCK, BLOCK))
    return tl.reduce(tl.reduce(wide, 3, max_nan), 1, max_nan)


@triton.jit
def row_max(x):
    """Return the largest of each VECTOR neighbours in a row of a float tile, fp32.

    It is NaN or ∞ where one is NaN.
    """
    R: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = x.shape[1] // VECTOR
    if INTERPRETED or x.dtype == tl.float32:
        wide = tl.reshape(widen(x), (R, COUNT, VECTOR))
        if INTERPRETED:
            return tl.max(tl.where(wide == wide, wide, float("inf")), 2)
        return tl.reduce(wide, 2, max_nan)
    asm: tl.constexpr = _MAX_BF16 if x.dtype == tl.bfloat16 else _MAX_FP16
    vectors = tl.reshape(x, (R * COUNT, VECTOR // 2, 2))
    for _ in tl.static_range(3):
        vectors = _halve(vectors, asm)
    return tl.reduce(widen(tl.reshape(vectors, (R, COUNT, 2))), 2, max_nan)


def halvings(block: int, config: TileConfig) -> int:
    """Count how often a block's rows can be halved within a thread: log2 of the rows it holds.

    Triton gives a thread 16 neighbours of a row, and the highest bits of the row number; those
    above a block's size number blocks.
    """
    across = min(32 * config.warps, config.tile_n // 16)
    down = 32 * config.warps // across
    return max(0, (block // down).bit_length() - 1)
