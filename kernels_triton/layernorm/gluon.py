"""LayerNorm in Gluon: statistics, sums and tiles are launches of their own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.gluon_rows import (
    RUN,
    add_parts,
    col_places,
    factors,
    finite,
    load_codes,
    load_vector,
    narrow,
    row_places,
    run_places,
    run_scales,
    squares4,
    store_quantised,
    tile_scales,
    to_floats,
    widen,
)

# The sum of four codes in the first of four places.
_SUM4 = gl.constexpr("""{
dp4a.s32.s32 $0, $4, 0x01010101, 0;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")


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
    """Write mean and rstd of R whole rows, from integer sums of each run.

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
        q = load_codes(x_ptr, rows, cols, M, N, x_stride)
        s = run_scales(x_scale_ptr, rows, runs, M, N, x_scale_stride, BLOCK)
        s = gl.sum(s, 2)
        sums = gl.inline_asm_elementwise(
            _SUM4, "=r,=r,=r,=r,r", [q], dtype=gl.int32, is_pure=True, pack=4
        )
        squares = squares4(q)
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
    OUT_BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    WHOLE: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write y = (x − mean)·rstd·weight + bias of a row of blocks, the last row of them first.

    The statistics' pass ended there, so part of it is still in the L2 cache.
    """
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * OUT_BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, OUT_BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    inside = (rows < M) & (cols < N)
    x = load_codes(x_ptr, rows, cols, M, N, x_stride)
    weight = load_vector(weight_ptr, cols, N)
    bias = load_vector(bias_ptr, cols, N)
    rstd = load_vector(rstd_ptr, rows, M)
    shift = load_vector(mean_ptr, rows, M) * rstd
    step = tile_scales(x_scale_ptr, rows, row0, runs, M, N, x_scale_stride, BLOCK, OUT_BLOCK) * rstd
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
        OUT_BLOCK,
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
    """Write a warp's sums over its part of STEPS·R rows and RUNS runs of columns.

    Σg and Σg·x̂ of each row, with g = dy·weight, go to plain_ptr and along_ptr [programs across, M];
    Σdy·x̂ and Σdy of each column, to dweight_ptr and dbias_ptr [programs down, N].
    """
    col0 = gl.program_id(0) * (RUNS * RUN)
    cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
    weight = load_vector(weight_ptr, cols, N)
    by_columns: gl.constexpr = gl.SliceLayout(0, layout)
    dweight = gl.full([RUNS, RUN], 0.0, gl.float32, by_columns)
    dbias = gl.full([RUNS, RUN], 0.0, gl.float32, by_columns)
    for i in range(STEPS):
        row0 = (gl.program_id(1) * STEPS + i) * R
        rows = row_places(row0, R, layout)
        inside = (rows < M) & (cols < N)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
        block_row = rows * 0 + row0
        x_scale = run_scales(x_scale_ptr, block_row, runs, M, N, x_scale_stride, BLOCK)
        dy_scale = run_scales(dy_scale_ptr, block_row, runs, M, N, dy_scale_stride, BLOCK)
        rstd = load_vector(rstd_ptr, rows, M)
        shift = load_vector(mean_ptr, rows, M) * rstd
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
def finish_kernel(
    plain_ptr,
    along_ptr,
    dweight_parts_ptr,
    dbias_parts_ptr,
    mean_ptr,
    rstd_ptr,
    first_ptr,
    second_ptr,
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

    Each row gets the slope, as two factors, and the offset of
    dx = dy·weight·rstd + x·slope + offset.
    """
    pid = gl.program_id(0)
    lanes = gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    if pid < row_programs:
        rows = pid * W + lanes
        rstd = load_vector(rstd_ptr, rows, M)
        mean = load_vector(mean_ptr, rows, M)
        along = add_parts(along_ptr, rows, M, across, P, layout) / N
        plain = add_parts(plain_ptr, rows, M, across, P, layout) / N
        first, second = factors(-along.to(gl.float64) * rstd * rstd)
        offset = -mean * first * second - plain * rstd
        gl.store(first_ptr + rows, first, mask=rows < M)
        gl.store(second_ptr + rows, second, mask=rows < M)
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
    first_ptr,
    second_ptr,
    offset_ptr,
    dsum_ptr,
    seed_ptr,
    total_ptr,
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
    dsum_stride,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    OUT_BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    WHOLE: gl.constexpr,
    RESIDUAL: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write dx = rstd·(g − mean(g) − x̂·mean(g·x̂)) of a row of blocks, the last row first.

    RESIDUAL adds dsum to dx, rounds the sum to bf16, writes it, and the codes of it.
    """
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * OUT_BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, OUT_BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    inside = (rows < M) & (cols < N)
    x = load_codes(x_ptr, rows, cols, M, N, x_stride)
    dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
    weight = load_vector(weight_ptr, cols, N)
    rstd = load_vector(rstd_ptr, rows, M)
    first, second = load_vector(first_ptr, rows, M), load_vector(second_ptr, rows, M)
    offset = load_vector(offset_ptr, rows, M)
    x_scale = tile_scales(x_scale_ptr, rows, row0, runs, M, N, x_scale_stride, BLOCK, OUT_BLOCK)
    dy_scale = tile_scales(dy_scale_ptr, rows, row0, runs, M, N, dy_scale_stride, BLOCK, OUT_BLOCK)
    # By one finite factor, then the other: a code of 0 makes 0 where the slope is infinite.
    of_x = to_floats(x) * finite(x_scale * first) * second + offset
    dx = to_floats(dy) * weight * dy_scale * rstd + of_x
    if not WHOLE:  # what lies beyond would hold the offset
        dx = gl.where(inside, dx, 0.0)
    if RESIDUAL:
        dsum = load_codes(dsum_ptr, rows, cols, M, N, dsum_stride)
        total = narrow(widen(dsum) + dx)
        gl.store(total_ptr + (rows.to(gl.int64) * N + cols), total, mask=inside)
        dx = widen(total)
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
        OUT_BLOCK,
        LAYOUT,
        STOCHASTIC,
        pairs,
        qt_layout,
    )
