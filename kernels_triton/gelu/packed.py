"""Conversions between packed INT8 codes and floats without the conversion unit.

I2F and F2I issue 16 lanes a clock an SM on Hopper, as ex2 and rcp do; four of these an element
would bind an INT8 elementwise kernel to half the bandwidth. Byte permutes and fp32 additions do the
same work at 64 and 128 lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import INTERPRETED, block_reduce_amax

# A byte b under the high bytes of 2^23 reads as 8388608 + b; codes become bytes by adding 128.
_TO_FLOATS = tl.constexpr("""{
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
# The product in units of 2^-15 (|p| ≤ 127 fits beside 1.5·2^23), doubled, plus 16 random bits: the
# floor of the sum is its third byte, with the top bit flipped by the 1.5.
_STOCHASTIC = tl.constexpr("""{
.reg .b32 p<4>, low, high;
fma.rn.f32 p0, $1, $5, 0f4B400000;
fma.rn.f32 p1, $2, $6, 0f4B400000;
fma.rn.f32 p2, $3, $7, 0f4B400000;
fma.rn.f32 p3, $4, $8, 0f4B400000;
mad.lo.u32 p0, p0, 2, $9;
mad.lo.u32 p1, p1, 2, $10;
mad.lo.u32 p2, p2, 2, $11;
mad.lo.u32 p3, p3, 2, $12;
prmt.b32 low, p0, p1, 0x0062;
prmt.b32 high, p2, p3, 0x0062;
prmt.b32 low, low, high, 0x5410;
xor.b32 $0, low, 0x80808080;
}""")


@triton.jit
def codes_to_floats(q):
    """int8 to fp32."""
    if INTERPRETED:
        return q.to(tl.float32)
    return tl.inline_asm_elementwise(
        _TO_FLOATS, "=f,=f,=f,=f,r", [q], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def codes_nearest(x, multiplier):
    """rint(x·multiplier) as int8, the product rounded once; for finite |x·multiplier| ≤ 127."""
    if INTERPRETED:
        return ((x * multiplier + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.int8)
    return tl.inline_asm_elementwise(
        _NEAREST, "=r,f,f,f,f,f,f,f,f", [x, multiplier], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def codes_stochastic(x, multiplier, bits):
    """floor(x·multiplier + bits/2^16) as int8, the product rounded to a multiple of 2^-15.

    For finite |x·multiplier| ≤ 127 and bits in [0, 2^16).
    """
    fine = multiplier * 32768.0
    if INTERPRETED:
        fixed = (x * fine + 12582912.0).to(tl.int32, bitcast=True)
        return ((fixed * 2 + bits) >> 16 ^ 0x80).to(tl.int8)
    return tl.inline_asm_elementwise(
        _STOCHASTIC, "=r,f,f,f,f,f,f,f,f,r,r,r,r", [x, fine, bits], dtype=tl.int8, is_pure=True,
        pack=4,
    )  # fmt: skip


@triton.jit
def block_amax(x, BLOCK: tl.constexpr):
    """max|x| of each BLOCK×BLOCK block of a finite tile: [R, C] → [R/BLOCK, C/BLOCK]."""
    if INTERPRETED:
        return block_reduce_amax(x, BLOCK)
    blocks = tl.reshape(tl.abs(x), (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    flat = tl.reshape(
        tl.permute(blocks, (0, 2, 1, 3)),
        (x.shape[0] // BLOCK, x.shape[1] // BLOCK, BLOCK * BLOCK),
    )
    return tl.max(flat, 2)


@triton.jit
def exp2_fast(x):
    """2^x, to 2 units in the last place; results below 2^-126 are 0."""
    if INTERPRETED:
        return tl.exp2(tl.minimum(x, 127.0))  # NumPy warns of what overflows
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_fast(x):
    """1/x, to 1 unit in the last place; results below 2^-126 are 0."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
