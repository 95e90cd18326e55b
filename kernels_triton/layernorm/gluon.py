"""LayerNorm in Gluon: layouts are chosen so that no element moves between threads.

A thread holds sixteen neighbours (a run) of some rows; what belongs to a run, a row or a column is
loaded where it is used. Left to Triton, vectors of columns and rows reach the tile through shared
memory with ten-way bank conflicts, which took four times as long as the instructions (ncu, H200).
Statistics, sums and tiles are launches of their own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.codes import HALVES, TO_FLOATS
from jetfire.kernels_triton.common import STREAM_ROUNDING, TINY
from jetfire.kernels_triton.gluon_common import max_nan, philox_words

RUN = gl.constexpr(16)

# The sum of four codes, and of their squares, in the first of four places.
_SUM4 = gl.constexpr("""{
dp4a.s32.s32 $0, $4, 0x01010101, 0;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")
_SQUARES4 = gl.constexpr("""{
dp4a.s32.s32 $0, $4, $4, 0;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")
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


def run_layout(
    rows: int, runs: int, last: int, warps: int, across: int
) -> gl.DistributedLinearLayout:
    """The layout of [rows, runs, last]: last in a thread, then `across` lanes along runs, the other
    lanes along rows; then registers along rows, warps along rows, and what is left along runs.

    A program of other `last` but the same rest has its runs in the same threads.
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


@gluon.jit
def row_places(row0, R: gl.constexpr, layout: gl.constexpr):
    """Rows of a tile, [R, 1, 1]."""
    rows = row0 + gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return rows.expand_dims(1).expand_dims(2)


@gluon.jit
def run_places(col0, RUNS: gl.constexpr, layout: gl.constexpr):
    """First columns of a tile's runs, [1, RUNS, 1]."""
    runs = gl.arange(0, RUNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    return (col0 + runs * RUN).expand_dims(0).expand_dims(2)


@gluon.jit
def col_places(col0, RUNS: gl.constexpr, layout: gl.constexpr):
    """Columns of a tile, [1, RUNS, RUN]."""
    e = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return run_places(col0, RUNS, layout) + e.expand_dims(0).expand_dims(1)


@gluon.jit
def to_floats(q):
    return gl.inline_asm_elementwise(
        TO_FLOATS, "=f,=f,=f,=f,r", [q], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def run_scales(ptr, rows, runs, M, N, stride, BLOCK: gl.constexpr):
    """Each run's scale, 0 beyond the matrix; in the shape that rows and runs make."""
    at = (rows // BLOCK).to(gl.int64) * stride + runs // BLOCK
    return gl.load(ptr + at, mask=(rows < M) & (runs < N), other=0.0)


@gluon.jit
def divide(a, b):
    """a/b in fp32, correctly rounded while every step is normal (kernels_triton.common.divide)."""
    y = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )
    y = gl.fma(y, gl.fma(-b, y, 1.0), y)
    quotient = a * y
    return gl.fma(gl.fma(-b, quotient, a), y, quotient)


@gluon.jit
def block_scales(amax):
    """Scale and multiplier of a block, as kernels_triton.common.block_scales."""
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
    """128 + u for each element, u as jetfire.reference.philox draws it: [R, RUNS, RUN].

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
    """A number for each block, [COUNT], at each of its runs: [1, RUNS, 1] in `layout`."""
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
    """Codes of [R, RUNS, RUN] values, the product rounded with the addition; 0 where not sound."""
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
def statistics_kernel(
    x_ptr,
    x_scale_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    eps,
    R: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    layout: gl.constexpr,
):
    """Mean and rstd of R whole rows, from integer sums of each run.

    Σq and Σq² of a run are exact, and so is 16·Σq² − (Σq)²; runs are combined as Chan, Golub and
    LeVeque do ("Updating formulae and a pairwise algorithm for computing sample variances", 1979,
    equation 2.1).
    """
    row0 = gl.program_id(0) * R
    rows = row_places(row0, R, layout)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    count = gl.full([R, RUNS], 0.0, gl.float32, flat)
    mean = gl.full([R, RUNS], 0.0, gl.float32, flat)
    square = gl.full([R, RUNS], 0.0, gl.float32, flat)
    for col0 in range(0, N, RUNS * RUN):
        cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
        inside = (rows < M) & (cols < N)
        q = gl.load(x_ptr + (rows.to(gl.int64) * x_stride + cols), mask=inside, other=0)
        s = run_scales(x_scale_ptr, rows, runs, M, N, x_scale_stride, BLOCK)
        s = gl.sum(s, 2)
        sums = gl.inline_asm_elementwise(
            _SUM4, "=r,=r,=r,=r,r", [q], dtype=gl.int32, is_pure=True, pack=4
        )
        squares = gl.inline_asm_elementwise(
            _SQUARES4, "=r,=r,=r,=r,r", [q], dtype=gl.int32, is_pure=True, pack=4
        )
        sum1 = gl.sum(sums, 2)
        fresh = gl.sum(gl.minimum(gl.maximum(N - runs, 0), RUN), 2)
        some = gl.maximum(fresh, 1).to(gl.float32)
        spreads = (gl.sum(squares, 2) * fresh - sum1 * sum1).to(gl.float32)
        fresh = fresh.to(gl.float32)
        ratio = gl.fdiv(fresh, gl.maximum(count + fresh, 1.0))
        step = s * (sum1.to(gl.float32) / some) - mean
        # A row of zeros has a spread of 0 whatever the scale, whose square may be infinite.
        square += s * (s * (spreads / some)) + step * step * (count * ratio)
        mean += step * ratio
        count += fresh
    row_mean = gl.sum(mean * count, 1) / N
    deviation = mean - row_mean.expand_dims(1)
    variance = gl.sum(square + deviation * deviation * count, 1) / N
    out = row0 + gl.arange(0, R, layout=row_mean.type.layout)
    gl.store(mean_ptr + out, row_mean, mask=out < M)
    gl.store(rstd_ptr + out, gl.rsqrt(variance + eps), mask=out < M)


@gluon.jit
def normalise_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    WHOLE: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """y = (x − mean)·rstd·weight + bias of a row of blocks, the last row of them first.

    The statistics' pass ended there, so part of it is still in the L2 cache.
    """
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    inside = (rows < M) & (cols < N)
    x = gl.load(x_ptr + (rows.to(gl.int64) * x_stride + cols), mask=inside, other=0)
    weight = gl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    bias = gl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    shift = gl.load(mean_ptr + rows, mask=rows < M, other=0.0) * rstd
    step = run_scales(x_scale_ptr, rows * 0 + row0, runs, M, N, x_scale_stride, BLOCK) * rstd
    y = (to_floats(x) * step - shift) * weight + bias
    if not WHOLE:  # rows beyond the last would hold the bias
        y = gl.where(inside, y, 0.0)
    store_quantised(
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
        BLOCK,
        LAYOUT,
        STOCHASTIC,
        pairs,
        qt_layout,
    )


@gluon.jit
def sums_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    plain_ptr,
    along_ptr,
    dweight_ptr,
    dbias_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    R: gl.constexpr,
    STEPS: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    layout: gl.constexpr,
):
    """A warp's sums over its part of STEPS·R rows and RUNS runs of columns.

    With g = dy·weight: Σg and Σg·x̂ of each row, to plain_ptr and along_ptr [programs across, M];
    Σdy·x̂ and Σdy of each column, to dweight_ptr and dbias_ptr [programs down, N].
    """
    col0 = gl.program_id(0) * (RUNS * RUN)
    cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
    weight = gl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    by_columns: gl.constexpr = gl.SliceLayout(0, layout)
    dweight = gl.full([RUNS, RUN], 0.0, gl.float32, by_columns)
    dbias = gl.full([RUNS, RUN], 0.0, gl.float32, by_columns)
    for i in range(STEPS):
        row0 = (gl.program_id(1) * STEPS + i) * R
        rows = row_places(row0, R, layout)
        inside = (rows < M) & (cols < N)
        x = gl.load(x_ptr + (rows.to(gl.int64) * x_stride + cols), mask=inside, other=0)
        dy = gl.load(dy_ptr + (rows.to(gl.int64) * dy_stride + cols), mask=inside, other=0)
        block_row = rows * 0 + row0
        x_scale = run_scales(x_scale_ptr, block_row, runs, M, N, x_scale_stride, BLOCK)
        dy_scale = run_scales(dy_scale_ptr, block_row, runs, M, N, dy_scale_stride, BLOCK)
        rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        shift = gl.load(mean_ptr + rows, mask=rows < M, other=0.0) * rstd
        xhat = to_floats(x) * (x_scale * rstd) - shift
        wide = to_floats(dy)
        g = wide * weight
        plain = gl.sum(gl.sum(g, 2) * gl.sum(dy_scale, 2), 1)
        along = gl.sum(gl.sum(g * xhat, 2) * gl.sum(dy_scale, 2), 1)
        out = row0 + gl.arange(0, R, layout=plain.type.layout)
        at = gl.program_id(0).to(gl.int64) * M + out
        gl.store(plain_ptr + at, plain, mask=out < M)
        gl.store(along_ptr + at, along, mask=out < M)
        run_scale = gl.max(dy_scale, 0)
        dweight += gl.sum(wide * xhat, 0) * run_scale
        dbias += gl.sum(wide, 0) * run_scale
    at = gl.program_id(1).to(gl.int64) * N + gl.max(cols, 0)
    inside = gl.max(cols, 0) < N
    gl.store(dweight_ptr + at, dweight, mask=inside)
    gl.store(dbias_ptr + at, dbias, mask=inside)


@gluon.jit
def add_parts(ptr, places, size, parts, P: gl.constexpr, layout: gl.constexpr):
    """Σ over parts, in order, of ptr [parts, size] at places [W]."""
    total = gl.full([P, places.shape[0]], 0.0, gl.float32, layout)
    lanes = gl.arange(0, P, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    for first in range(0, parts, P):
        part = first + lanes
        inside = (part < parts) & (places < size).expand_dims(0)
        total += gl.load(
            ptr + (part.to(gl.int64) * size + places.expand_dims(0)), mask=inside, other=0.0
        )
    return gl.sum(total, 0)


@gluon.jit
def finish_kernel(
    plain_ptr,
    along_ptr,
    dweight_parts_ptr,
    dbias_parts_ptr,
    mean_ptr,
    rstd_ptr,
    slope_ptr,
    offset_ptr,
    dweight_ptr,
    dbias_ptr,
    M,
    N,
    across,
    down,
    row_programs,
    P: gl.constexpr,
    W: gl.constexpr,
    layout: gl.constexpr,
):
    """Add up the parts of the rows (the first row_programs) and of the columns.

    For each row, what dx = dy·weight·rstd + x·slope + offset takes, without x's scale in slope.
    """
    pid = gl.program_id(0)
    lanes = gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    if pid < row_programs:
        rows = pid * W + lanes
        rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        mean = gl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        slope = -rstd * rstd * (add_parts(along_ptr, rows, M, across, P, layout) / N)
        offset = -mean * slope - rstd * (add_parts(plain_ptr, rows, M, across, P, layout) / N)
        gl.store(slope_ptr + rows, slope, mask=rows < M)
        gl.store(offset_ptr + rows, offset, mask=rows < M)
    else:
        cols = (pid - row_programs) * W + lanes
        dweight = add_parts(dweight_parts_ptr, cols, N, down, P, layout)
        gl.store(dweight_ptr + cols, dweight, mask=cols < N)
        dbias = add_parts(dbias_parts_ptr, cols, N, down, P, layout)
        gl.store(dbias_ptr + cols, dbias, mask=cols < N)


@gluon.jit
def gradient_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    rstd_ptr,
    slope_ptr,
    offset_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    WHOLE: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """dx = rstd·(g − mean(g) − x̂·mean(g·x̂)) of a row of blocks, the last row of them first."""
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    inside = (rows < M) & (cols < N)
    x = gl.load(x_ptr + (rows.to(gl.int64) * x_stride + cols), mask=inside, other=0)
    dy = gl.load(dy_ptr + (rows.to(gl.int64) * dy_stride + cols), mask=inside, other=0)
    weight = gl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    slope = gl.load(slope_ptr + rows, mask=rows < M, other=0.0)
    offset = gl.load(offset_ptr + rows, mask=rows < M, other=0.0)
    block_row = rows * 0 + row0
    x_scale = run_scales(x_scale_ptr, block_row, runs, M, N, x_scale_stride, BLOCK)
    dy_scale = run_scales(dy_scale_ptr, block_row, runs, M, N, dy_scale_stride, BLOCK)
    dx = (to_floats(dy) * (dy_scale * rstd)) * weight + (to_floats(x) * (x_scale * slope) + offset)
    if not WHOLE:  # what lies beyond would hold the offset
        dx = gl.where(inside, dx, 0.0)
    store_quantised(
        dx,
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
        BLOCK,
        LAYOUT,
        STOCHASTIC,
        pairs,
        qt_layout,
    )
