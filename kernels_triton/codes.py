"""Conversions between packed INT8 codes and floats without the conversion unit.

I2F and F2I issue 16 lanes per clock and SM on Hopper, as ex2 and rcp do; four of these per element
would bind an INT8 elementwise kernel to half the bandwidth. Byte permutes and fp32 additions do the
same work at 64 and 128 lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import INTERPRETED

# A byte b under the high bytes of 2^23 reads as 8388608 + b; codes become bytes by adding 128.
TO_FLOATS = tl.constexpr("""{
.reg .b32 codes, f<4>;
xor.b32 codes, $4, 0x80808080;
prmt.b32 f0, codes, 0x4B000000, 0x7650;
prmt.b32 f1, codes, 0x4B000000, 0x7651;
prmt.b32 f2, codes, 0x4B000000, 0x7652;
prmt.b32 f3, codes, 0x4B000000, 0x7653;
add.f32 $0, f0, 0fCB000080;
add.f32 $1, f1, 0fCB000080;
add.f32 $2, f2, 0fCB000080;
add.f32 $3, f3, 0fCB000080;
}""")
# Each code plus 128, as the low byte under three of another word.
_TO_INDEX = tl.constexpr("""{
.reg .b32 codes;
xor.b32 codes, $4, 0x80808080;
prmt.b32 $0, codes, $5, 0x6540;
prmt.b32 $1, codes, $6, 0x6541;
prmt.b32 $2, codes, $7, 0x6542;
prmt.b32 $3, codes, $8, 0x6543;
}""")
# Adding 1.5·2^23 leaves the product, rounded to nearest even, in the low byte.
_NEAREST = tl.constexpr("""{
.reg .b32 p<4>, low, high;
fma.rn.f32 p0, $1, $5, 0f4B400000;
fma.rn.f32 p1, $2, $6, 0f4B400000;
fma.rn.f32 p2, $3, $7, 0f4B400000;
fma.rn.f32 p3, $4, $8, 0f4B400000;
prmt.b32 low, p0, p1, 0x0040;
prmt.b32 high, p2, p3, 0x0040;
prmt.b32 $0, low, high, 0x5410;
}""")
# Low and high half-words under the exponent of 128; the constant is a register, once for eight.
HALVES = tl.constexpr("""{
.reg .b32 top;
mov.b32 top, 0x4300;
prmt.b32 $0, $8, top, 0x5410;
prmt.b32 $1, $9, top, 0x5410;
prmt.b32 $2, $10, top, 0x5410;
prmt.b32 $3, $11, top, 0x5410;
prmt.b32 $4, $8, top, 0x5432;
prmt.b32 $5, $9, top, 0x5432;
prmt.b32 $6, $10, top, 0x5432;
prmt.b32 $7, $11, top, 0x5432;
}""")
# 128 + u + p lies in [1, 256), so rounding it down onto 1.5·2^23 − 128 leaves floor(p + u) there.
_STOCHASTIC = tl.constexpr("""{
.reg .f32 p<4>;
.reg .b32 r<4>, low, high;
fma.rn.f32 p0, $1, $5, $9;
fma.rn.f32 p1, $2, $6, $10;
fma.rn.f32 p2, $3, $7, $11;
fma.rn.f32 p3, $4, $8, $12;
add.rm.f32 r0, p0, 0f4B3FFF80;
add.rm.f32 r1, p1, 0f4B3FFF80;
add.rm.f32 r2, p2, 0f4B3FFF80;
add.rm.f32 r3, p3, 0f4B3FFF80;
prmt.b32 low, r0, r1, 0x0040;
prmt.b32 high, r2, r3, 0x0040;
prmt.b32 $0, low, high, 0x5410;
}""")


@triton.jit
def codes_to_floats(q):
    """Convert int8 to fp32."""
    if INTERPRETED:
        return q.to(tl.float32)
    return tl.inline_asm_elementwise(
        TO_FLOATS, "=f,=f,=f,=f,r", [q], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def codes_to_index(q, block):
    """Return q + 128 + 256·block, of int8 and int32."""
    if INTERPRETED:
        return q.to(tl.int32) + 128 + 256 * block
    return tl.inline_asm_elementwise(
        _TO_INDEX, "=r,=r,=r,=r,r,r,r,r,r", [q, block], dtype=tl.int32, is_pure=True, pack=4
    )


@triton.jit
def codes_nearest(x, multiplier):
    """Return rint(x·multiplier) as int8; the product, rounded once, must be within ±127."""
    if INTERPRETED:
        return ((x * multiplier + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)
    return tl.inline_asm_elementwise(
        _NEAREST, "=r,f,f,f,f,f,f,f,f", [x, multiplier], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def draws_128(w0, w1, w2, w3):
    """Return 128 + u for the eight draws u in [0, 1) of each four Philox words: fp32 [words…, 8].

    Sixteen bits go under the exponent of 128: one byte permute per draw.
    """
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    if INTERPRETED:
        low, high = (words & 0xFFFF) | 0x43000000, (words >> 16) | 0x43000000
    else:
        low, high = tl.inline_asm_elementwise(
            HALVES,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=4,
        )
    return tl.join(low, high).to(tl.float32, bitcast=True)


@triton.jit
def codes_stochastic(x, multiplier, draws):
    """Return floor(x·multiplier + u) as int8, the sum rounded to 2^-16; draws are 128 + u.

    |x·multiplier| must be below 127: at -127 the floor of a product rounded down would be -128.
    """
    if INTERPRETED:
        return tl.floor(tl.fma(x, multiplier, draws) - 128.0).to(tl.int8)
    return tl.inline_asm_elementwise(
        _STOCHASTIC,
        "=r,f,f,f,f,f,f,f,f,f,f,f,f",
        [x, multiplier, draws],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def exp2_fast(x):
    """Return 2^x, to 2 units in the last place; results below 2^-126 are 0."""
    if INTERPRETED:
        return tl.exp2(tl.minimum(x, 127.0))  # NumPy warns of what overflows
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_fast(x):
    """Return 1/x, to 1 unit in the last place; results below 2^-126 are 0."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
