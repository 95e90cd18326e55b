"""Functions that the Triton kernels share: block quantisation of a tile, random bits, rounding."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter runs no inline assembly; there these helpers take a slower, equal way.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
TINY = tl.constexpr(2.0**-100)  # a smaller amax counts as 0, as in jetfire.reference.quantize
ROUNDS = tl.constexpr(7)  # as jetfire.reference.philox
STREAM_ROUNDING = tl.constexpr(0)
STREAM_DROPOUT = tl.constexpr(1)
IGNORED = tl.constexpr(-100)  # as jetfire.reference.cross_entropy
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def max_nan(a, b):
    """Return the larger of two, NaN if either is: one FMNMX.NAN, as cheap as dropping it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """Return e^x to 2^-22·(1 + |x|), 0 below 2^-126, without the steps for subnormal results."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2E], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def block_reduce_amax(x, BLOCK: tl.constexpr):
    """Return max|x| of each BLOCK×BLOCK block of a tile: [R, C] → [R/BLOCK, C/BLOCK].

    It is NaN or ∞ where a block holds NaN; `block_scales` treats them alike.
    """
    blocks = tl.reshape(tl.abs(x), (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    if INTERPRETED:
        # The interpreter's own max drops NaN, and any other reduction is a Python loop there.
        blocks = tl.where(blocks == blocks, blocks, float("inf"))
        return tl.max(tl.max(blocks, 3), 1)
    return tl.reduce(tl.reduce(blocks, 3, max_nan), 1, max_nan)


@triton.jit
def spread(blocks, BLOCK: tl.constexpr):
    """Repeat each block's value at each of its elements: [R/BLOCK, C/BLOCK] → [R, C]."""
    wide = tl.broadcast_to(
        blocks[:, None, :, None], (blocks.shape[0], BLOCK, blocks.shape[1], BLOCK)
    )
    return tl.reshape(wide, (blocks.shape[0] * BLOCK, blocks.shape[1] * BLOCK))


@triton.jit
def hadamard(row, col, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Return SIZE×SIZE entries of the unscaled Hadamard transform from (row, col) on, int8.

    They are ±1 within a group of columns, else 0. Both places lie within a group, or are 0 where
    there are several in SIZE.
    """
    i, j = row + tl.arange(0, SIZE)[:, None], col + tl.arange(0, SIZE)[None, :]
    parity = i & j & (GROUP - 1)
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return tl.where(i // GROUP == j // GROUP, 1 - 2 * (parity & 1), 0).to(tl.int8)


@triton.jit
def divide(a, b):
    """Return a/b in fp32, correctly rounded where both and every step between are normal numbers.

    It takes one Newton step on the reciprocal and one on the quotient, as `div.rn` does in range,
    without the branch that `div.rn` adds for what is out of range.
    """
    if INTERPRETED:
        return tl.div_rn(a, b)
    y = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
    )
    y = tl.fma(y, tl.fma(-b, y, 1.0), y)
    quotient = a * y
    return tl.fma(tl.fma(-b, quotient, a), y, quotient)


@triton.jit
def block_scales(amax):
    """Return a block's scale and multiplier: amax/127 and 127/amax, correctly rounded.

    Both are 0 below 2^-100. Where the block holds NaN or ±Inf they are NaN and 0.
    """
    zero = amax < TINY
    usable = (amax < float("inf")) & (amax >= TINY)
    # Down by 2^64 where the reciprocal would be subnormal: exact both ways.
    shrink = tl.where(amax > 1.8446744073709552e19, 5.421010862427522e-20, 1.0)
    safe = tl.where(usable, amax * shrink, 127.0)
    most = tl.full(amax.shape, 127.0, tl.float32)
    scale = divide(tl.where(usable, amax, 127.0), most)
    scale = tl.where(usable, scale, tl.where(zero, 0.0, float("nan")))
    return scale, tl.where(usable, divide(most, safe) * shrink, 0.0)


@triton.jit
def to_float(x, dtype: tl.constexpr):
    """Convert fp32 to another float dtype, ties to even; the interpreter's own cast truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def philox_words(seed, c0, c1, stream: tl.constexpr):
    """Return the four words of Philox at counters (c0, c1, 0, stream), uint32 of one shape each.

    They are those of jetfire.reference.philox. A product is taken in 64 bits: one
    IMAD.WIDE where `tl.philox` takes an IMAD and an IMAD.HI.
    """
    key = seed.to(tl.uint64)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c2 = tl.zeros(c0.shape, tl.uint32)
    c3 = tl.full(c0.shape, stream, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_words(seed, row0, col0, R: tl.constexpr, C: tl.constexpr, stream: tl.constexpr):
    """Return Philox words for the tile at (row0, col0): uint32 [R, C/16, 2, 2, 2], element order.

    The bits are those of jetfire.reference.philox.random_u16: each word's low half is for one
    element and its high half for the next. col0 and C must be multiples of 16: a thread makes two
    calls in a row, for as many elements as it loads or stores of INT8, so that no bits move between
    threads.
    """
    groups = (col0 // 8 + 2 * tl.arange(0, C // 16)).to(tl.uint32)
    rows = (row0 + tl.arange(0, R)).to(tl.uint32)
    c0 = tl.broadcast_to(groups[None, :], (R, C // 16))
    c1 = tl.broadcast_to(rows[:, None], (R, C // 16))
    a0, a1, a2, a3 = philox_words(seed, c0, c1, stream)
    b0, b1, b2, b3 = philox_words(seed, c0 + 1, c1, stream)
    w0, w1, w2, w3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def random_u16(seed, row0, col0, R: tl.constexpr, C: tl.constexpr, stream: tl.constexpr):
    """Return sixteen random bits for each element of the tile at (row0, col0), as int32 [R, C].

    The bits are those of jetfire.reference.philox.random_u16; col0 and C as for `random_words`.
    """
    words = random_words(seed, row0, col0, R, C, stream)
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (R, C)).to(tl.int32)


@triton.jit
def round_to_codes(p, multiplier, BLOCK: tl.constexpr, DOWN: tl.constexpr):
    """Round p, in [-127.5, 128), to int8, to nearest or DOWN; 0 in a block whose multiplier is 0.

    Adding 1.5·2^23 leaves the rounded integer in the low bits, at the rate of an FADD where F2I
    takes four times as long. What a block of multiplier 0 holds may be NaN: its codes are masked,
    four at once.
    """
    if INTERPRETED:
        p = tl.where(spread(multiplier, BLOCK) != 0, p, 0.0)
        if DOWN:
            return tl.floor(p).to(tl.int8)
        return ((p + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    mask = spread(tl.where(multiplier != 0, -1, 0).to(tl.int8), BLOCK)
    if DOWN:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 f<4>; .reg .b32 r<6>;
            add.rm.f32 f0, $1, 0f4B400000; add.rm.f32 f1, $2, 0f4B400000;
            add.rm.f32 f2, $3, 0f4B400000; add.rm.f32 f3, $4, 0f4B400000;
            mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
            prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
            prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $5; }""",
            "=r,f,f,f,f,r",
            [p, mask],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        """{ .reg .f32 f<4>; .reg .b32 r<6>;
        add.rn.f32 f0, $1, 0f4B400000; add.rn.f32 f1, $2, 0f4B400000;
        add.rn.f32 f2, $3, 0f4B400000; add.rn.f32 f3, $4, 0f4B400000;
        mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
        prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
        prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $5; }""",
        "=r,f,f,f,f,r",
        [p, mask],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def tile_codes(x, multiplier, seed, row0, col0, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return codes, int8 [R, C], of an fp32 tile whose blocks have multipliers [R/BLOCK, C/BLOCK].

    Compile with enable_fp_fusion=False: the product and the addition of the draw round apart.
    """
    p = x * spread(multiplier, BLOCK)
    if STOCHASTIC:
        bits = random_u16(seed, row0, col0, x.shape[0], x.shape[1], STREAM_ROUNDING)
        # bits·2^-16 is exact, so this rounds as p + u does; I2F takes either half of a word as it
        # is. A product that rounds to just below -127 may floor to -128.
        p = tl.maximum(tl.fma(bits.to(tl.float32), 1.52587890625e-05, p), -127.0)
    return round_to_codes(p, multiplier, BLOCK, STOCHASTIC)


@triton.jit
def quantize_tile(x, seed, row0, col0, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return codes int8 [R, C] and scales fp32 [R/BLOCK, C/BLOCK] of a tile padded with zeros.

    Compile with enable_fp_fusion=False, as for `tile_codes`.
    """
    scale, multiplier = block_scales(block_reduce_amax(x, BLOCK))
    return tile_codes(x, multiplier, seed, row0, col0, BLOCK, STOCHASTIC), scale
