"""RMSNorm in Gluon: one launch reads whole rows of blocks twice, the second time from a cache.

Threads hold runs of sixteen neighbours, and warps lie side by side along a row,
so that a block of 32 rows is one warp's and its maximum crosses no barrier. The second pass goes
back from the last columns to the first: the last are still in the SM's own cache.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.gluon_rows import (
    RUN,
    add_parts,
    col_places,
    load_codes,
    load_vector,
    row_places,
    run_places,
    squares4,
    store_quantised,
    to_floats,
)


@gluon.jit
def finite(x):
    """Replace ∞ by fp32's largest number, so that a code of 0 times it is 0; x is not −∞."""
    return gl.minimum(x, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def block_row_scales(ptr, row0, runs, N, stride, BLOCK: gl.constexpr):
    """Load each run's scale in the row of blocks at row0, [1, RUNS, 1]; 0 beyond the matrix."""
    at = (row0 // BLOCK).to(gl.int64) * stride + runs // BLOCK
    return gl.load(ptr + at, mask=runs < N, other=0.0)


@gluon.jit
def by_row(values, layout: gl.constexpr):
    """Convert a number for each row, [BLOCK], to the layout of a tile: [BLOCK, 1, 1]."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    return gl.convert_layout(values, rows).expand_dims(1).expand_dims(2)


@gluon.jit
def forward_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    rstd_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    eps,
    SUM_RUNS: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    sums: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write rstd and y = x·rstd·weight of a row of blocks; a run's squares add up as integers."""
    SUM_WIDTH: gl.constexpr = SUM_RUNS * RUN
    WIDTH: gl.constexpr = RUNS * RUN
    row0 = gl.program_id(0) * BLOCK
    rows = row_places(row0, BLOCK, sums)
    square = gl.full([BLOCK, SUM_RUNS], 0.0, gl.float32, gl.SliceLayout(2, sums))
    for col0 in range(0, N, SUM_WIDTH):
        cols, runs = col_places(col0, SUM_RUNS, sums), run_places(col0, SUM_RUNS, sums)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        squares = squares4(x)
        s = gl.sum(block_row_scales(x_scale_ptr, row0, runs, N, x_scale_stride, BLOCK), 2)
        # In this order a row of zeros adds 0 whatever the scale, whose square may be infinite.
        square += s * (s * gl.sum(squares, 2).to(gl.float32))
    mean = gl.sum(square, 1) / N
    out = row0 + gl.arange(0, BLOCK, layout=mean.type.layout)
    # Without eps the rstd of rows beyond the last would be infinite.
    row_rstd = gl.where(out < M, gl.rsqrt(mean + eps), 0.0)
    gl.store(rstd_ptr + out, row_rstd, mask=out < M)
    rows = row_places(row0, BLOCK, layout)
    rstd = by_row(row_rstd, layout)
    last = (gl.cdiv(N, WIDTH) - 1) * WIDTH
    for back in range(0, N, WIDTH):
        col0 = last - back
        cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        weight = load_vector(weight_ptr, cols, N)
        s = block_row_scales(x_scale_ptr, row0, runs, N, x_scale_stride, BLOCK)
        y = to_floats(x) * finite(s * rstd) * weight
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
def backward_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    rstd_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    part_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    SUM_RUNS: gl.constexpr,
    RUNS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
    sums: gl.constexpr,
    layout: gl.constexpr,
    pairs: gl.constexpr,
    qt_layout: gl.constexpr,
):
    """Write dx = rstd·(g − x̂·mean(g·x̂)), g = dy·weight, of a row of blocks, and its Σ dy·x̂.

    The sums of each column go to part_ptr [programs, N].
    """
    SUM_WIDTH: gl.constexpr = SUM_RUNS * RUN
    WIDTH: gl.constexpr = RUNS * RUN
    row0 = gl.program_id(0) * BLOCK
    rows = row_places(row0, BLOCK, sums)
    rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    part_at = part_ptr + gl.program_id(0).to(gl.int64) * N
    along = gl.full([BLOCK, SUM_RUNS], 0.0, gl.float32, gl.SliceLayout(2, sums))
    for col0 in range(0, N, SUM_WIDTH):
        cols, runs = col_places(col0, SUM_RUNS, sums), run_places(col0, SUM_RUNS, sums)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
        weight = load_vector(weight_ptr, cols, N)
        x_scale = block_row_scales(x_scale_ptr, row0, runs, N, x_scale_stride, BLOCK)
        dy_scale = block_row_scales(dy_scale_ptr, row0, runs, N, dy_scale_stride, BLOCK)
        product = to_floats(x) * to_floats(dy)
        # Scales in this order keep every step about as large as x̂ or its product with dy.
        of_run = gl.sum(product * weight, 2) * gl.sum(x_scale * rstd, 2)
        along += of_run * gl.sum(dy_scale, 2)
        dweight = gl.sum(product * rstd, 0) * gl.max(x_scale, 0) * gl.max(dy_scale, 0)
        places = gl.max(cols, 0)
        gl.store(part_at + places, dweight, mask=places < N)
    rows = row_places(row0, BLOCK, layout)
    rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    slope = by_row(gl.sum(along, 1) / N, layout) * rstd
    last = (gl.cdiv(N, WIDTH) - 1) * WIDTH
    for back in range(0, N, WIDTH):
        col0 = last - back
        cols, runs = col_places(col0, RUNS, layout), run_places(col0, RUNS, layout)
        x = load_codes(x_ptr, rows, cols, M, N, x_stride)
        dy = load_codes(dy_ptr, rows, cols, M, N, dy_stride)
        weight = load_vector(weight_ptr, cols, N)
        x_scale = block_row_scales(x_scale_ptr, row0, runs, N, x_scale_stride, BLOCK)
        dy_scale = block_row_scales(dy_scale_ptr, row0, runs, N, dy_scale_stride, BLOCK)
        of_x = to_floats(x) * (x_scale * rstd * slope)
        dx = to_floats(dy) * finite(dy_scale * rstd) * weight - of_x
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


@gluon.jit
def columns_kernel(
    part_ptr, out_ptr, N, parts, P: gl.constexpr, W: gl.constexpr, layout: gl.constexpr
):
    """Add up parts, in a fixed order, of part_ptr [parts, N]."""
    cols = gl.program_id(0) * W + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    gl.store(out_ptr + cols, add_parts(part_ptr, cols, N, parts, P, layout), mask=cols < N)
