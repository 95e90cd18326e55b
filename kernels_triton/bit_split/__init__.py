"""Bit splitting: a pass for the largest magnitude, then one for the codes, whole rows per program.

Only the unit goes from the first pass to the second. The second begins with the last rows: some of
them are still in the L2 cache from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.common import INTERPRETED, STREAM_ROUNDING, TINY, random_words
from jetfire.kernels_triton.halves import widen
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    load_tile,
    power_reason,
    share_reason,
    store_tile,
    tile_count,
    warps_reason,
)
from jetfire.reference.bit_split import MOST

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


@dataclass(frozen=True)
class BitSplitConfig(Config):
    """A program of `warps` warps takes `tile_m` whole rows, `tile_n` columns at a time.

    The first pass runs `waves` programs of as many warps on each multiprocessor.
    """

    tile_m: int = 4
    tile_n: int = 512
    warps: int = 4
    waves: int = 8


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
def load_pairs(
    x_ptr, row0, pair0, M, PAIRS, stride, R: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr
):
    """Load the even and the odd elements of R rows of P pairs: fp32 [R, P] each, 0 beyond M×PAIRS.

    With TOGETHER a pair lies at a multiple of its size, and is loaded as one integer. The tile then
    has the threads of the codes' bytes, which a tile of elements would not.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if not TOGETHER:
        cols = 2 * pair0 + 2 * tl.arange(0, P)
        rows = row0 + tl.arange(0, R)
        at = x_ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
        inside = (rows < M)[:, None] & (cols < 2 * PAIRS)[None, :]
        even, odd = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        return even.to(tl.float32), odd.to(tl.float32)
    elif dtype == tl.float32:
        both = x_ptr.to(tl.pointer_type(tl.int64))
        pairs = load_tile(both, row0, pair0, M, PAIRS, stride // 2, R, P)
        even, odd = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    else:
        both = x_ptr.to(tl.pointer_type(tl.int32))
        pairs = load_tile(both, row0, pair0, M, PAIRS, stride // 2, R, P)
        if dtype == tl.bfloat16:
            even, odd = pairs << 16, pairs & -65536
            return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
        else:
            even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
            even, odd = even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True)
            return even.to(tl.float32), odd.to(tl.float32)


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


@triton.jit
def split_kernel(
    x_ptr,
    seed_ptr,
    unit_ptr,
    q_ptr,
    squares_ptr,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    unit = tl.load(unit_ptr)
    usable = unit > 0
    seed = tl.load(seed_ptr) if BITS == 8 else 0
    inverse = tl.div_rn(1.0, tl.where(usable, unit, 1.0))
    half: tl.constexpr = TILE_N // 2
    # Where the unit is 0 or NaN, as many pairs as are loaded: every code is 0.
    pairs = tl.where(usable, N // 2, 0)
    kept = tl.where(unit == unit, -1, 0)  # the row whose first code must be 1
    low_ptr = q_ptr + tl.cast(M, tl.int64) * (N // 2)
    high_squares = tl.zeros((TILE_M, half), tl.int32)
    low_squares = tl.zeros((TILE_M, half), tl.int32)
    for pair0 in range(0, N // 2, half):
        even, odd = load_pairs(x_ptr, row0, pair0, M, pairs, stride, TILE_M, half, TOGETHER)
        even, odd = even * inverse, odd * inverse
        if BITS == 8:
            words = random_words(seed, row0, 2 * pair0, TILE_M, TILE_N, STREAM_ROUNDING)
            words = tl.reshape(words, (TILE_M, half))
            high, low, squares, others = codes_split(even, odd, words, VECTORS)
            low_squares += others
            store_tile(low_ptr, low, row0, pair0, M, N // 2, N // 2)
        else:
            high, squares = codes_nearest(even, odd, VECTORS)
        high_squares += squares
        if (kept == row0) & (pair0 == 0):
            first = (rows == kept)[:, None] & (tl.arange(0, half) == 0)[None, :]
            high = tl.where(first, 1, high)
        store_tile(q_ptr, high, row0, pair0, M, N // 2, N // 2)
    total = tl.sum(high_squares, 1) + tl.where(rows == kept, 1, 0)
    tl.store(squares_ptr + rows, total, mask=rows < M)
    if BITS == 8:
        tl.store(squares_ptr + M + rows, tl.sum(low_squares, 1), mask=rows < M)


class TritonBitSplit(TritonKernel):
    op = "bit_split"
    Config = BitSplitConfig
    choices: ClassVar = {
        "tile_m": (1, 2, 4, 8, 16, 32),
        "tile_n": (128, 256, 512, 1024, 2048),
        "warps": (1, 2, 4, 8, 16),
        "waves": (2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: BitSplitConfig, device: Device) -> str | None:
        reason = (
            device_reason(device)
            or power_reason(config, "tile_m", expected="a power of two of at least 1")
            or power_reason(config, "tile_n", expected="a power of two of at least 32", least=32)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 8, 64)
        )
        if reason is None and not 1 <= config.waves <= 64:
            return f"waves={config.waves}: expected 1 to 64"
        return reason or grid_reason(tile_count(problem.m, problem.n, config))

    def default(self, problem: Any, device: Device) -> BitSplitConfig:
        """Return the widest tile of which at most an eighth of the columns is idle."""
        widths = (t for t in (1024, 512, 256) if -problem.n % t <= problem.n // 8)
        tile_n = next(widths, 128)
        return BitSplitConfig(2048 // tile_n, tile_n)

    def launches(self, problem: Any, config: BitSplitConfig, device: Device) -> tuple[Launch, ...]:
        count = tile_count(problem.m, problem.n, config)
        programs = min(count, config.waves * device.sms)
        given = {"most": float(MOST[problem.bits]), "tiles": count, "programs": programs}
        bands = (ceil_div(problem.m, config.tile_m),)
        return (
            Launch(largest_kernel, (programs,), problem, config, **given),
            Launch(split_kernel, bands, problem, config, **EXACT),
        )

    def launch(
        self, problem: Any, config: BitSplitConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        x = inputs["x"]
        tensors = {**inputs, **outputs, "counter": counters(x.device, 2)}
        largest, split = self.prepared(problem, config, inputs)
        largest(tensors)
        together = x.stride(0) % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0
        vectors = (problem.n | x.stride(0) | x.data_ptr()) % 16 == 0
        split(tensors, TOGETHER=together, VECTORS=vectors)


KERNELS = (TritonBitSplit(),)
