"""What the Triton kernels share: block quantisation of a tile, random bits, rounding."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter runs no inline assembly; there these helpers take a slower, equal way.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
ROUNDS = tl.constexpr(7)  # as jetfire.reference.philox
STREAM_ROUNDING = tl.constexpr(0)
STREAM_DROPOUT = tl.constexpr(1)


@triton.jit
def max_nan(a, b):
    """The larger of two, NaN if either is: one FMNMX.NAN, as cheap as the max that drops NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_reduce_amax(x, BLOCK: tl.constexpr):
    """max|x| of each BLOCK×BLOCK block of a tile: [R, C] → [R/BLOCK, C/BLOCK].

    NaN or ∞ where a block holds NaN; `block_scales` treats them alike.
    """
    blocks = tl.reshape(tl.abs(x), (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    if INTERPRETED:
        # The interpreter's own max drops NaN, and any other reduction is a Python loop there.
        blocks = tl.where(blocks == blocks, blocks, float("inf"))
        return tl.max(tl.max(blocks, 3), 1)
    return tl.reduce(tl.reduce(blocks, 3, max_nan), 1, max_nan)


@triton.jit
def spread(blocks, BLOCK: tl.constexpr):
    """Each block's value at each of its elements: [R/BLOCK, C/BLOCK] → [R, C]."""
    wide = tl.broadcast_to(
        blocks[:, None, :, None], (blocks.shape[0], BLOCK, blocks.shape[1], BLOCK)
    )
    return tl.reshape(wide, (blocks.shape[0] * BLOCK, blocks.shape[1] * BLOCK))


@triton.jit
def block_scales(amax):
    """Scale and multiplier of a block: amax/127 and 127/amax, correctly rounded.

    0 and 0 below 2^-100; NaN and 0 where the block holds NaN or ±Inf.
    """
    usable = (amax >= 7.888609052210118e-31) & (amax < float("inf"))
    safe = tl.where(usable, amax, 127.0)
    zero = amax < 7.888609052210118e-31
    scale = tl.where(usable, tl.div_rn(safe, 127.0), tl.where(zero, 0.0, float("nan")))
    return scale, tl.where(usable, tl.div_rn(tl.full(amax.shape, 127.0, tl.float32), safe), 0.0)


@triton.jit
def round_nearest(p):
    """rint to int32, ties to even, NaN to 0."""
    if INTERPRETED:
        # Adding 1.5·2^23 leaves the rounded integer in the low bits, for |p| < 2^22.
        bits = (p + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        return tl.where(p == p, bits, 0)
    return tl.inline_asm_elementwise(
        "cvt.rni.s32.f32 $0, $1;", "=r,f", [p], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def round_down(p):
    """floor to int32, NaN to 0."""
    if INTERPRETED:
        return tl.where(p == p, tl.floor(p), 0.0).to(tl.int32)
    return tl.inline_asm_elementwise(
        "cvt.rmi.s32.f32 $0, $1;", "=r,f", [p], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def to_float(x, dtype: tl.constexpr):
    """An fp32 tensor as another float dtype, ties to even; the interpreter's own cast truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def random_u16(seed, row0, col0, R: tl.constexpr, C: tl.constexpr, stream: tl.constexpr):
    """Sixteen random bits for each element of the tile at (row0, col0), as int32 [R, C].

    The same bits as jetfire.reference.philox.random_u16: one Philox call gives eight neighbours
    in a row theirs, so col0 must be a multiple of 8.
    """
    groups = (col0 // 8 + tl.arange(0, C // 8)).to(tl.uint32)
    rows = (row0 + tl.arange(0, R)).to(tl.uint32)
    c0 = tl.broadcast_to(groups[None, :], (R, C // 8))
    c1 = tl.broadcast_to(rows[:, None], (R, C // 8))
    zero = tl.zeros((R, C // 8), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero, zero + stream, n_rounds=ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, C)).to(tl.int32)


@triton.jit
def quantize_tile(x, seed, row0, col0, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes int8 [R, C] and scales fp32 [R/BLOCK, C/BLOCK] of an fp32 tile padded with zeros.

    Compile with enable_fp_fusion=False: the product and the addition of the draw round apart.
    """
    scale, multiplier = block_scales(block_reduce_amax(x, BLOCK))
    p = x * spread(multiplier, BLOCK)
    if STOCHASTIC:
        bits = random_u16(seed, row0, col0, x.shape[0], x.shape[1], STREAM_ROUNDING)
        # A product that rounds to just below -127 may floor to -128.
        q = tl.maximum(round_down(p + bits.to(tl.float32) * 1.52587890625e-05), -127)
    else:
        q = round_nearest(p)
    return q.to(tl.int8), scale
