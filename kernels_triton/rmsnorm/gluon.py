"""RMSNorm in Gluon: statistics, sums and tiles are launches of their own, as LayerNorm's are.

One launch whose programs go twice through a row of blocks was as fast in blocks of 32, but leaves
half of an H200 idle in blocks of 128: 8192 rows are 64 programs, and 8192×4096 took 66 µs forward,
not 33.
"""

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


@gluon.jit
def statistics_kernel(
    x_ptr,
    x_scale_ptr,
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
    """Write rstd of R whole rows; a run's squares add up as integers."""
    row0 = gl.program_id(0) * R
    rows = row_places(row0, R, layout)
    square = gl.full([R, RUNS], 0.0, gl.float32, gl.SliceLayout(2, layout))
    for col0 in range(0, N, RUNS * RUN):
        cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
        squares = squares4(load_codes(x_ptr, rows, cols, M, N, x_stride))
        s = gl.sum(run_scales(x_scale_ptr, rows, runs, M, N, x_scale_stride, BLOCK), 2)
        # In this order a row of zeros adds 0 whatever the scale, whose square may be infinite.
        square += s * (s * gl.sum(squares, 2).to(gl.float32))
    mean = gl.sum(square, 1) / N
    out = row0 + gl.arange(0, R, layout=mean.type.layout)
    gl.store(rstd_ptr + out, gl.rsqrt(mean + eps), mask=out < M)


@gluon.jit
def normalise_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
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
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write y = x·rstd·weight of a row of blocks, the last row of them first.

    The statistics' pass ended there, so part of it is still in the L2 cache.
    """
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * OUT_BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, OUT_BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    x = load_codes(x_ptr, rows, cols, M, N, x_stride)
    weight = load_vector(weight_ptr, cols, N)
    rstd = load_vector(rstd_ptr, rows, M)
    s = tile_scales(x_scale_ptr, rows, row0, runs, M, N, x_scale_stride, BLOCK, OUT_BLOCK)
    store_quantised(
        to_floats(x) * finite(s * rstd) * weight,
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
    rstd_ptr,
    along_ptr,
    dweight_ptr,
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

    Σg·x̂ of each row, with g = dy·weight, goes to along_ptr [programs across, M]; Σdy·x̂ of each
    column, to dweight_ptr [programs down, N].
    """
    col0 = gl.program_id(0) * (RUNS * RUN)
    cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
    weight = load_vector(weight_ptr, cols, N)
    dweight = gl.full([RUNS, RUN], 0.0, gl.float32, gl.SliceLayout(0, layout))
    for i in range(STEPS):
        row0 = (gl.program_id(1) * STEPS + i) * R
        rows = row_places(row0, R, layout)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
        block_row = rows * 0 + row0
        x_scale = run_scales(x_scale_ptr, block_row, runs, M, N, x_scale_stride, BLOCK)
        dy_scale = run_scales(dy_scale_ptr, block_row, runs, M, N, dy_scale_stride, BLOCK)
        rstd = load_vector(rstd_ptr, rows, M)
        product = to_floats(x) * to_floats(dy)
        # Scales in this order keep every step about as large as x̂ or its product with dy.
        of_run = gl.sum(product * weight, 2) * gl.sum(x_scale * rstd, 2)
        along = gl.sum(of_run * gl.sum(dy_scale, 2), 1)
        out = row0 + gl.arange(0, R, layout=along.type.layout)
        gl.store(along_ptr + gl.program_id(0).to(gl.int64) * M + out, along, mask=out < M)
        dweight += gl.sum(product * rstd, 0) * gl.max(x_scale, 0) * gl.max(dy_scale, 0)
    places = gl.max(cols, 0)
    at = gl.program_id(1).to(gl.int64) * N + places
    gl.store(dweight_ptr + at, dweight, mask=places < N)


@gluon.jit
def finish_kernel(
    along_ptr,
    dweight_parts_ptr,
    rstd_ptr,
    first_ptr,
    second_ptr,
    dweight_ptr,
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

    Each row gets its slope, rstd²·mean(g·x̂), as two factors.
    """
    pid = gl.program_id(0)
    lanes = gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    if pid < row_programs:
        rows = pid * W + lanes
        rstd = load_vector(rstd_ptr, rows, M)
        mean = add_parts(along_ptr, rows, M, across, P, layout) / N
        first, second = factors(mean.to(gl.float64) * rstd * rstd)
        gl.store(first_ptr + rows, first, mask=rows < M)
        gl.store(second_ptr + rows, second, mask=rows < M)
    else:
        cols = (pid - row_programs) * W + lanes
        dweight = add_parts(dweight_parts_ptr, cols, N, down, P, layout)
        gl.store(dweight_ptr + cols, dweight, mask=cols < N)


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
    RESIDUAL: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write dx = rstd·(g − x̂·mean(g·x̂)), g = dy·weight, of a row of blocks, the last row first.

    RESIDUAL adds dsum to dx, rounds the sum to bf16, writes it, and the codes of it.
    """
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * OUT_BLOCK
    col0 = gl.program_id(0) * (RUNS * RUN)
    rows, runs = row_places(row0, OUT_BLOCK, layout), run_places(col0, RUNS, layout)
    cols = col_places(col0, RUNS, layout)
    x = load_codes(x_ptr, rows, cols, M, N, x_stride)
    dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
    weight = load_vector(weight_ptr, cols, N)
    rstd = load_vector(rstd_ptr, rows, M)
    first, second = load_vector(first_ptr, rows, M), load_vector(second_ptr, rows, M)
    x_scale = tile_scales(x_scale_ptr, rows, row0, runs, M, N, x_scale_stride, BLOCK, OUT_BLOCK)
    dy_scale = tile_scales(dy_scale_ptr, rows, row0, runs, M, N, dy_scale_stride, BLOCK, OUT_BLOCK)
    # By one finite factor, then the other: a code of 0 makes 0 where the slope is infinite.
    of_x = to_floats(x) * finite(x_scale * first) * second
    dx = to_floats(dy) * weight * dy_scale * rstd - of_x
    if RESIDUAL:
        dsum = load_codes(dsum_ptr, rows, cols, M, N, dsum_stride)
        total = narrow(widen(dsum) + dx)
        inside = (rows < M) & (cols < N)
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
