"""Bit splitting's parts: the largest magnitude, and the codes of pairs of elements in units."""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import INTERPRETED, TINY
from jetfire.kernels_triton.halves import widen
from jetfire.kernels_triton.tiles import load_tile

_FOURTEENTH = tl.constexpr(0.0714285746216774)  # 1/14 in fp32


def _pairs(line: str) -> str:
    """Repeat a line of PTX for the even and the odd element of each of four pairs."""
    names = [(half, i) for half in "eo" for i in range(4)]
    return "\n".join(line.format(x=f"{half}{i}", half=half, i=i) for half, i in names)


def _pack(code: str, packed: str, squares: str, vectors: bool) -> str:
    """Write PTX that packs four pairs of codes, the low bytes of `code`, and sums their squares.

    Bytes of even elements go to e, of odd ones to o. With `vectors` the pairs are of one row: one
    dot product of all four gives Σ codes², in the first one's place.
    """
    first, *rest = places = squares.split()
    sums = f"dp4a.s32.s32 g, e, e, 0; dp4a.s32.s32 {first}, o, o, g;"
    sums += " ".join(f"mov.b32 {place}, 0;" for place in rest)
    if not vectors:
        sums = " ".join(
            f"prmt.b32 g, e, o, 0x{4 + i}{i}{4 + i}{i}; and.b32 p, g, 0xFFFF; "
            f"dp4a.s32.s32 {place}, g, p, 0;"
            for i, place in enumerate(places)
        )
    return f"""
    prmt.b32 e, {code}e0, {code}e1, 0x0040; prmt.b32 g, {code}e2, {code}e3, 0x0040;
    prmt.b32 e, e, g, 0x5410;
    prmt.b32 o, {code}o0, {code}o1, 0x0040; prmt.b32 g, {code}o2, {code}o3, 0x0040;
    prmt.b32 o, o, g, 0x5410;
    {sums}
    shl.b32 o, o, 4; and.b32 e, e, 0x0F0F0F0F; and.b32 o, o, 0xF0F0F0F0; or.b32 {packed}, e, o;"""


def _registers(*names: str) -> str:
    """Declare a PTX register for each element of four pairs."""
    return " ".join(f".reg .b32 {name}e<4>, {name}o<4>;" for name in names)


def _operand(even: int, odd: int) -> str:
    """Move the asm's operands to xe0 … xo3."""
    return " ".join(f"mov.b32 xe{i}, ${even + i}; mov.b32 xo{i}, ${odd + i};" for i in range(4))


def _nearest(vectors: bool) -> str:
    """Write PTX that rounds to nearest: adding 1.5·2^23 leaves the integer in the low bits."""
    return (
        "{ .reg .b32 e, o, g, p;"
        + _registers("x", "h")
        + _operand(5, 9)
        + _pairs("add.rn.f32 h{x}, x{x}, 0f4B400000;")
        + _pack("h", "$0", "$1 $2 $3 $4", vectors)
        + "}"
    )


def _split(vectors: bool) -> str:
    """Write PTX that splits four pairs, each with a word of Philox: the even element's draw is low.

    Sixteen bits under the exponent of 128 are 128 + u; v − 14·hi + 128 + u lies in [121, 136), so
    that rounding it down onto 1.5·2^23 − 128 leaves lo there, never out of range.
    """
    draws = (
        f"prmt.b32 ue{i}, ${18 + i}, top, 0x5410; prmt.b32 uo{i}, ${18 + i}, top, 0x5432;"
        for i in range(4)
    )
    return (
        "{ .reg .b32 e, o, g, p, top; mov.b32 top, 0x4300;"
        + _registers("x", "h", "f", "u", "l")
        + _operand(10, 14)
        + _pairs("fma.rn.f32 h{x}, x{x}, 0f3D924925, 0f4B400000;")
        + _pairs("add.rn.f32 f{x}, h{x}, 0fCB400000;")
        + " ".join(draws)
        + _pairs("fma.rn.f32 u{x}, f{x}, 0fC1600000, u{x};")
        + _pairs("add.rn.f32 u{x}, x{x}, u{x};")
        + _pairs("add.rm.f32 l{x}, u{x}, 0f4B3FFF80;")
        + _pack("h", "$0", "$2 $3 $4 $5", vectors)
        + _pack("l", "$1", "$6 $7 $8 $9", vectors)
        + "}"
    )


# The compiler chooses which rows a thread's four pairs are of, unless they are loaded at once.
_NEAREST, _NEAREST_VECTORS = (tl.constexpr(_nearest(vectors)) for vectors in (False, True))
_SPLIT, _SPLIT_VECTORS = (tl.constexpr(_split(vectors)) for vectors in (False, True))


@triton.jit
def largest_kernel(
    x_ptr,
    unit_ptr,
    counter_ptr,
    M,
    N,
    stride,
    most,
    tiles,
    programs,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Find the unit, max|x|/most; the last program to arrive writes it.

    Magnitudes are compared as their bits, in which ∞ and every NaN are above all numbers.
    """
    across = tl.cdiv(N, TILE_N)
    largest = tl.zeros((TILE_M, TILE_N), tl.int32)
    for first in range(0, tiles, programs):
        tile = first + tl.program_id(0)  # the last may lie below the matrix
        row0, col0 = tile // across * TILE_M, tile % across * TILE_N
        x = widen(load_tile(x_ptr, row0, col0, M, N, stride, TILE_M, TILE_N))
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(counter_ptr, tl.max(tl.max(largest, 1), 0))
    if tl.atomic_add(counter_ptr + 1, 1) == programs - 1:
        amax = tl.atomic_xchg(counter_ptr, 0).to(tl.float32, bitcast=True)
        tl.store(counter_ptr + 1, 0)
        unit = tl.div_rn(tl.where(amax < float("inf"), amax, float("nan")), most)
        tl.store(unit_ptr, tl.where(amax < TINY, 0.0, unit))


@triton.jit
def pack(even, odd):
    """Return packed codes, int8 [R, P], of integers in fp32, and each pair's Σ codes²."""
    e, o = even.to(tl.int32), odd.to(tl.int32)
    packed = ((e & 15) | (o << 4)).to(tl.int8)
    return packed, e * e + o * o


@triton.jit
def rint(x):
    """Round an fp64 tensor to the nearest integers, ties to even."""
    return x + 6755399441055744.0 - 6755399441055744.0


@triton.jit
def codes_nearest(even, odd, VECTORS: tl.constexpr):
    """Round pairs of elements in [-7.5, 7.5]: packed int8, and each pair's Σ codes²."""
    if INTERPRETED:
        return pack(rint(even.to(tl.float64)), rint(odd.to(tl.float64)))
    return tl.inline_asm_elementwise(
        _NEAREST_VECTORS if VECTORS else _NEAREST,
        "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [even, odd],
        dtype=(tl.int8, tl.int32),
        is_pure=True,
        pack=4,
    )


@triton.jit
def split(v, bits):
    """Split elements in units into hi and lo, integers in fp32; draws have sixteen bits."""
    high = rint(v.to(tl.float64) * _FOURTEENTH).to(tl.float32)
    draw = 128.0 + bits.to(tl.float32) * 1.52587890625e-05
    return high, tl.floor(v + (draw - 14.0 * high)) - 128.0


@triton.jit
def codes_split(even, odd, words, VECTORS: tl.constexpr):
    """Split pairs of elements in units: packed int8 and Σ codes², for hi and for lo."""
    if INTERPRETED:
        high_even, low_even = split(even, words & 0xFFFF)
        high_odd, low_odd = split(odd, words >> 16)
        high, high_squares = pack(high_even, high_odd)
        low, low_squares = pack(low_even, low_odd)
        return high, low, high_squares, low_squares
    return tl.inline_asm_elementwise(
        _SPLIT_VECTORS if VECTORS else _SPLIT,
        "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [even, odd, words],
        dtype=(tl.int8, tl.int8, tl.int32, tl.int32),
        is_pure=True,
        pack=4,
    )
