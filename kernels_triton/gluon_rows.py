"""Rows of a quantised matrix in Gluon, for LayerNorm and RMSNorm.

Layouts are chosen so that no element moves between threads, but for transposed codes. A thread
holds sixteen neighbours (a run) of some rows; what belongs to a run, a row or a column is loaded
where it is used. Triton alone has vectors of columns and rows reach the tile through shared memory
with ten-way bank conflicts, which took four times as long as the instructions (ncu, H200).
"""

from __future__ import annotations

from functools import cache

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.codes import HALVES, TO_FLOATS
from jetfire.kernels_triton.common import STREAM_ROUNDING, TINY
from jetfire.kernels_triton.gluon_common import max_nan, philox_words

RUN = gl.constexpr(16)

# Adding 1.5·2^23 leaves the rounded product in the low byte.
_NEAREST = gl.constexpr("""{
.reg .f32 f<4>; .reg .b32 r<6>;
fma.rn.f32 f0, $1, $5, 0f4B400000; fma.rn.f32 f1, $2, $6, 0f4B400000;
fma.rn.f32 f2, $3, $7, 0f4B400000; fma.rn.f32 f3, $4, $8, 0f4B400000;
mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $9; }""")
# 128 + u + p lies in [1, 256): rounding it down onto 1.5·2^23 − 128 leaves floor(p + u) there.
_STOCHASTIC = gl.constexpr("""{
.reg .f32 f<4>; .reg .b32 r<6>;
fma.rn.f32 f0, $1, $5, $9; fma.rn.f32 f1, $2, $6, $10;
fma.rn.f32 f2, $3, $7, $11; fma.rn.f32 f3, $4, $8, $12;
add.rm.f32 f0, f0, 0f4B3FFF80; add.rm.f32 f1, f1, 0f4B3FFF80;
add.rm.f32 f2, f2, 0f4B3FFF80; add.rm.f32 f3, f3, 0f4B3FFF80;
mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $13; }""")
# The sum of four codes' squares in the first of four places.
_SQUARES4 = gl.constexpr("""{
dp4a.s32.s32 $0, $4, $4, 0;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")


@cache  # Gluon checks each layout: 29 of the 209 ms of a launched 350M step under cProfile
def run_layout(
    rows: int, runs: int, last: int, warps: int, across: int
) -> gl.DistributedLinearLayout:
    """Return the layout of a tile [rows, runs, last].

    A thread has all of `last`. Of the lanes `across` lie along runs, the others along rows; then
    come registers along rows, warps along rows, and what is left along runs. Layouts that differ in
    `last` alone have their runs in the same threads.
    """
    registers = [[0, 0, 1 << i] for i in range(last.bit_length() - 1)]
    bases = [[0, 1 << i, 0] for i in range(across.bit_length() - 1)]
    r = 1
    while len(bases) < 5 and r < rows:
        bases.append([r, 0, 0])
        r *= 2
    run = across
    while len(bases) < 5:
        bases.append([0, run, 0])
        run *= 2
    lanes = bases
    held = rows * runs // (32 * warps)
    while held > 1 and r < rows:
        registers.append([r, 0, 0])
        r, held = 2 * r, held // 2
    while held > 1:
        registers.append([0, run, 0])
        run, held = 2 * run, held // 2
    bases = []
    while r < rows:
        bases.append([r, 0, 0])
        r *= 2
    while run < runs:
        bases.append([0, run, 0])
        run *= 2
    return gl.DistributedLinearLayout(registers, lanes, bases, [], [rows, runs, last])


@cache
def qt_layout(block: int, warps: int) -> gl.BlockedLayout:
    """Return the layout in which transposed codes are written: a run of them per thread."""
    return gl.BlockedLayout([1, 16], [32 * 16 // block, block // 16], [warps, 1], [1, 0])


@gluon.jit
def row_places(row0, R: gl.constexpr, layout: gl.constexpr):
    """Return the rows of a tile, [R, 1, 1]."""
    rows = row0 + gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return rows.expand_dims(1).expand_dims(2)


@gluon.jit
def run_places(col0, RUNS: gl.constexpr, layout: gl.constexpr):
    """Return the first columns of a tile's runs, [1, RUNS, 1]."""
    runs = gl.arange(0, RUNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    return (col0 + runs * RUN).expand_dims(0).expand_dims(2)


@gluon.jit
def col_places(col0, RUNS: gl.constexpr, layout: gl.constexpr):
    """Return the columns of a tile, [1, RUNS, RUN]."""
    e = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return run_places(col0, RUNS, layout) + e.expand_dims(0).expand_dims(1)


@gluon.jit
def load_codes(ptr, rows, cols, M, N, stride):
    """Load codes at rows and columns, 0 beyond the matrix; 64-bit offsets."""
    return gl.load(ptr + (rows.to(gl.int64) * stride + cols), mask=(rows < M) & (cols < N), other=0)


@gluon.jit
def load_vector(ptr, places, size):
    """Load a number for each place of a row or a column, 0 beyond its end."""
    return gl.load(ptr + places, mask=places < size, other=0.0)


@gluon.jit
def finite(x):
    """Replace ∞ by fp32's largest number, so that a code of 0 times it is 0; x is not −∞."""
    return gl.minimum(x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def factors(x):
    """Return an fp64 number as two fp32 factors, each about the size of its square root.

    A value that is multiplied by one and then by the other passes through nothing larger or smaller
    than what it begins and ends as.
    """
    exponent = ((x.to(gl.int64, bitcast=True) >> 52) & 0x7FF).to(gl.int32) - 1023
    half = gl.minimum(gl.maximum(exponent >> 1, -126), 127)
    first = ((half + 127) << 23).to(gl.float32, bitcast=True)
    inverse = ((1023 - half).to(gl.int64) << 52).to(gl.float64, bitcast=True)
    return first, (x * inverse).to(gl.float32)


@gluon.jit
def run_scales(ptr, rows, runs, M, N, stride, BLOCK: gl.constexpr):
    """Load each run's scale, 0 beyond the matrix, in the shape that rows and runs make."""
    at = (rows // BLOCK).to(gl.int64) * stride + runs // BLOCK
    return gl.load(ptr + at, mask=(rows < M) & (runs < N), other=0.0)


@gluon.jit
def tile_scales(ptr, rows, row0, runs, M, N, stride, BLOCK: gl.constexpr, OUT_BLOCK: gl.constexpr):
    """Load each run's scale of a tile [OUT_BLOCK, RUNS, RUN] at row0, of codes in blocks of BLOCK.

    Where these are at least as high as the tile, one row of them serves all its rows.
    """
    if OUT_BLOCK <= BLOCK:
        rows = rows * 0 + row0
    return run_scales(ptr, rows, runs, M, N, stride, BLOCK)


@gluon.jit
def squares4(q):
    """Add up the squares of every four neighbours: int32 of q's shape, zeros in three places."""
    return gl.inline_asm_elementwise(
        _SQUARES4, "=r,=r,=r,=r,r", [q], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def to_floats(q):
    """Convert int8 to fp32."""
    return gl.inline_asm_elementwise(
        TO_FLOATS, "=f,=f,=f,=f,r", [q], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def widen(x):
    """Convert bf16 to fp32, as `kernels_triton.halves.widen` does."""
    return gl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def narrow(x):
    """Convert fp32 to bf16, as `kernels_triton.halves.narrow` does."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def divide(a, b):
    """Return a/b in fp32, correctly rounded, as `kernels_triton.common.divide` does."""
    y = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )
    y = gl.fma(y, gl.fma(-b, y, 1.0), y)
    quotient = a * y
    return gl.fma(gl.fma(-b, quotient, a), y, quotient)


@gluon.jit
def block_scales(amax):
    """Return scale and multiplier of a block, as kernels_triton.common.block_scales."""
    zero = amax < TINY
    usable = (amax < float("inf")) & (amax >= TINY)
    shrink = gl.where(amax > 1.8446744073709552e19, 5.421010862427522e-20, 1.0)
    safe = gl.where(usable, amax * shrink, 127.0)
    most = gl.full_like(amax, 127.0)
    scale = divide(gl.where(usable, amax, 127.0), most)
    scale = gl.where(usable, scale, gl.where(zero, 0.0, float("nan")))
    return scale, gl.where(usable, divide(most, safe) * shrink, 0.0)


@gluon.jit
def draws(
    seed, rows, runs, R: gl.constexpr, RUNS: gl.constexpr, layout: gl.constexpr, pairs: gl.constexpr
):
    """Return 128 + u for each element, [R, RUNS, RUN], u as jetfire.reference.philox draws it.

    rows [R, 1, 1] and runs [1, RUNS, 1] are in `pairs`, the layout of [R, RUNS, 2].
    """
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, pairs)))
    c2 = gl.full([R, RUNS, 2], 0, gl.uint32, pairs)
    c3 = c2 + STREAM_ROUNDING
    c0 = c2 + (runs // 8 + second.expand_dims(0).expand_dims(1)).to(gl.uint32)
    c1 = c2 + rows.to(gl.uint32)
    words = philox_words(seed, c0, c1, c2, c3)
    low, high = gl.inline_asm_elementwise(
        HALVES,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=4,
    )
    u = gl.join(low, high).to(gl.float32, bitcast=True).reshape((R, RUNS, RUN))
    return gl.convert_layout(u, layout, assert_trivial=True)


@gluon.jit
def by_block(values, layout: gl.constexpr, RUNS: gl.constexpr):
    """Repeat a number for each block, [COUNT], at each of its runs: [1, RUNS, 1] in `layout`."""
    COUNT: gl.constexpr = values.shape[0]
    wide, _ = gl.broadcast(
        values.expand_dims(1),
        gl.full([COUNT, RUNS // COUNT], 0, values.dtype, values.expand_dims(1).type.layout),
    )
    runs: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    return gl.convert_layout(wide.reshape((RUNS,)), runs).expand_dims(0).expand_dims(2)


@gluon.jit
def round_codes(
    y, multiplier, sound, seed_ptr, row0, col0, STOCHASTIC: gl.constexpr, pairs: gl.constexpr
):
    """Return codes of [R, RUNS, RUN] values, 0 where not sound; product and sum round together."""
    layout: gl.constexpr = y.type.layout
    R: gl.constexpr = y.shape[0]
    RUNS: gl.constexpr = y.shape[1]
    wide, _ = gl.broadcast(by_block(multiplier, layout, RUNS), y)
    mask, _ = gl.broadcast(
        by_block(sound, layout, RUNS), gl.full([R, RUNS, RUN], 0, gl.int8, layout)
    )
    if STOCHASTIC:
        rows, runs = row_places(row0, R, pairs), run_places(col0, RUNS, pairs)
        u = draws(gl.load(seed_ptr), rows, runs, R, RUNS, layout, pairs)
        return gl.inline_asm_elementwise(
            _STOCHASTIC,
            "=r,f,f,f,f,f,f,f,f,f,f,f,f,r",
            [y, wide, u, mask],
            dtype=gl.int8,
            is_pure=True,
            pack=4,
        )
    return gl.inline_asm_elementwise(
        _NEAREST, "=r,f,f,f,f,f,f,f,f,r", [y, wide, mask], dtype=gl.int8, is_pure=True, pack=4
    )


@gluon.jit
def store_quantised(
    y,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    rows,
    cols,
    row0,
    col0,
    M,
    N,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Quantise a row of blocks, [BLOCK, RUNS, RUN], zeros beyond the matrix; write it as LAYOUT."""
    RUNS: gl.constexpr = y.shape[1]
    COUNT: gl.constexpr = RUNS * RUN // BLOCK
    amax = gl.reduce(gl.reduce(gl.abs(y), 2, max_nan), 0, max_nan)
    amax = gl.reduce(amax.reshape((COUNT, BLOCK // RUN)), 1, max_nan)
    scale, multiplier = block_scales(amax)
    sound = gl.where(multiplier != 0, -1, 0).to(gl.int8)
    if STOCHASTIC:
        multiplier *= 0.9999998  # a product of just -127 might floor to -128
    q = round_codes(y, multiplier, sound, seed_ptr, row0, col0, STOCHASTIC, pairs)
    blocks_m, blocks_n = gl.cdiv(M, BLOCK), gl.cdiv(N, BLOCK)
    block = col0 // BLOCK + gl.arange(0, COUNT, layout=scale.type.layout)
    if LAYOUT != "qt":
        gl.store(q_ptr + (rows.to(gl.int64) * N + cols), q, mask=(rows < M) & (cols < N))
        at = scale_ptr + (row0 // BLOCK).to(gl.int64) * blocks_n + block
        gl.store(at, scale, mask=block < blocks_n)
    if LAYOUT != "q":
        qt = gl.convert_layout(q.permute((1, 2, 0)).reshape((RUNS * RUN, BLOCK)), qt_layout)
        n = col0 + gl.arange(0, RUNS * RUN, layout=gl.SliceLayout(1, qt_layout))
        m = row0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, qt_layout))
        inside = (n < N).expand_dims(1) & (m < M).expand_dims(0)
        gl.store(qt_ptr + ((n.to(gl.int64) * M).expand_dims(1) + m.expand_dims(0)), qt, mask=inside)
        at = scale_t_ptr + block.to(gl.int64) * blocks_m + row0 // BLOCK
        gl.store(at, scale, mask=block < blocks_n)


@gluon.jit
def add_parts(ptr, places, size, parts, P: gl.constexpr, layout: gl.constexpr):
    """Add up parts, in order, of ptr [parts, size] at places [W]."""
    total = gl.full([P, places.shape[0]], 0.0, gl.float32, layout)
    lanes = gl.arange(0, P, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    for first in range(0, parts, P):
        part = first + lanes
        inside = (part < parts) & (places < size).expand_dims(0)
        total += gl.load(
            ptr + (part.to(gl.int64) * size + places.expand_dims(0)), mask=inside, other=0.0
        )
    return gl.sum(total, 0)
