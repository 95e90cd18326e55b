"""LayerNorm backward: two sums over each row, then tiles of dx with the sums over columns.

With x̂ = (x − mean)·rstd and g = dy·weight, dx = rstd·(g − mean(g) − x̂·mean(g·x̂)).
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.gelu.packed import codes_to_floats
from jetfire.kernels_triton.layernorm.blocks import (
    block_cols,
    block_rows,
    load_columns,
    load_scales,
    store_blocks,
)
from jetfire.kernels_triton.layernorm.tasks import arrive, leave, take, wait
from jetfire.kernels_triton.tiles import load_tile


@triton.jit
def row_sums(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, quads_ptr, row0,
    M, N, x_stride, x_scale_stride, dy_stride, dy_scale_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """rstd, mean·rstd, rstd·mean(g) and rstd·mean(g·x̂) of ROWS whole rows, to quads_ptr [M, 4].

    Scales are those of runs of sixteen columns (a thread's load), and are applied to their sums.
    """
    RUN: tl.constexpr = 16
    RUNS: tl.constexpr = CHUNK // RUN
    runs: tl.constexpr = (ROWS, RUNS, RUN)
    rows = row0 + tl.arange(0, ROWS)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    shift = tl.load(mean_ptr + rows, mask=rows < M, other=0.0) * rstd
    x_scale_ptr += (row0 // BLOCK).to(tl.int64) * x_scale_stride
    dy_scale_ptr += (row0 // BLOCK).to(tl.int64) * dy_scale_stride
    plain = tl.zeros((ROWS, RUNS), tl.float32)
    along = tl.zeros((ROWS, RUNS), tl.float32)
    for col0 in tl.range(0, N, CHUNK, num_stages=STAGES):
        x = codes_to_floats(load_tile(x_ptr, row0, col0, M, N, x_stride, ROWS, CHUNK))
        dy = codes_to_floats(load_tile(dy_ptr, row0, col0, M, N, dy_stride, ROWS, CHUNK))
        cols = col0 + tl.arange(0, CHUNK)
        g = dy * tl.load(weight_ptr + cols, mask=cols < N, other=0.0)[None, :]
        run = col0 + tl.arange(0, RUNS) * RUN
        x_scale = tl.load(x_scale_ptr + run // BLOCK, mask=run < N, other=0.0)[None, :]
        dy_scale = tl.load(dy_scale_ptr + run // BLOCK, mask=run < N, other=0.0)[None, :]
        sum_g = tl.sum(tl.reshape(g, runs), 2)
        sum_gx = tl.sum(tl.reshape(g * x, runs), 2)
        plain += dy_scale * sum_g
        along += dy_scale * ((x_scale * rstd[:, None]) * sum_gx - shift[:, None] * sum_g)
    at = quads_ptr + rows.to(tl.int64) * 4
    tl.store(at, rstd, mask=rows < M)
    tl.store(at + 1, shift, mask=rows < M)
    tl.store(at + 2, rstd * (tl.sum(plain, 1) / N), mask=rows < M)
    tl.store(at + 3, rstd * (tl.sum(along, 1) / N), mask=rows < M)


@triton.jit
def load_quads(quads_ptr, rows, M):
    """The four numbers of each row, in rows' shape."""
    at = quads_ptr + rows.to(tl.int64) * 4
    rstd = tl.load(at, mask=rows < M, other=0.0, cache_modifier=".cg")
    shift = tl.load(at + 1, mask=rows < M, other=0.0, cache_modifier=".cg")
    plain = tl.load(at + 2, mask=rows < M, other=0.0, cache_modifier=".cg")
    along = tl.load(at + 3, mask=rows < M, other=0.0, cache_modifier=".cg")
    return rstd, shift, plain, along


@triton.jit
def reduce_columns(
    partial_ptr, dweight_ptr, dbias_ptr, col0, bands, N, TILE_N: tl.constexpr, CHUNK: tl.constexpr
):
    """Add up every band's part of TILE_N columns, in order."""
    cols = col0 + tl.arange(0, TILE_N)
    dweight = tl.zeros((TILE_N,), tl.float32)
    dbias = tl.zeros((TILE_N,), tl.float32)
    for first in range(0, bands, CHUNK):
        band = first + tl.arange(0, CHUNK)
        inside = (band < bands)[:, None] & (cols < N)[None, :]
        at = partial_ptr + band.to(tl.int64)[:, None] * N + cols[None, :]
        dweight += tl.sum(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        at += bands.to(tl.int64) * N
        dbias += tl.sum(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    tl.store(dweight_ptr + cols, dweight, mask=cols < N)
    tl.store(dbias_ptr + cols, dbias, mask=cols < N)


@triton.jit
def strip(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr, counter_ptr, band, bands, col0, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride, first, across,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """dx of WALK rows of COUNT blocks, one below the other, and their part of the column sums."""
    L: tl.constexpr = BLOCK // H
    V: tl.constexpr = BLOCK // VEC
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    cols = col0 + block_cols(COUNT, V, VEC)
    weight = load_columns(weight_ptr, col0, N, COUNT, V, VEC)
    if WAIT:
        wait(counter_ptr, first)
        leave(counter_ptr, first, across)
    dweight = tl.zeros((1, COUNT, L, V, VEC), tl.float32)
    dbias = tl.zeros((1, COUNT, L, V, VEC), tl.float32)
    for i in range(WALK):
        row0 = (band * WALK + i) * BLOCK
        rows = row0 + block_rows(H, L)
        inside = (rows < M) & (cols < N)
        x = tl.load(x_ptr + (rows.to(tl.int64) * x_stride + cols), mask=inside, other=0)
        dy = tl.load(dy_ptr + (rows.to(tl.int64) * dy_stride + cols), mask=inside, other=0)
        x_scale = load_scales(x_scale_ptr, row0, col0, M, N, x_scale_stride, COUNT, BLOCK)
        dy_scale = load_scales(dy_scale_ptr, row0, col0, M, N, dy_scale_stride, COUNT, BLOCK)
        rstd, shift, plain, along = load_quads(quads_ptr, rows, M)
        xhat = codes_to_floats(x) * (x_scale * rstd) - shift
        wide = codes_to_floats(dy)
        dx = (wide * (dy_scale * weight)) * rstd - (xhat * along + plain)
        if not WHOLE:  # columns beyond the last would hold the rows' sums
            dx = tl.where(cols < N, dx, 0.0)
        dweight += dy_scale * tl.sum(wide * xhat, 0)[None, :, :, :, :]
        dbias += dy_scale * tl.sum(wide, 0)[None, :, :, :, :]
        store_blocks(
            dx, seed, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, rows, cols, inside,
            M, N, BLOCK, LAYOUT, STOCHASTIC,
        )  # fmt: skip
    cols = col0 + tl.arange(0, COUNT * BLOCK)
    at = partial_ptr + band.to(tl.int64) * N + cols
    dweight = tl.reshape(tl.sum(dweight, 2), (COUNT * BLOCK,))
    dbias = tl.reshape(tl.sum(dbias, 2), (COUNT * BLOCK,))
    tl.store(at, dweight, mask=cols < N)
    tl.store(at + bands.to(tl.int64) * N, dbias, mask=cols < N)


@triton.jit
def strip_and_columns(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, band_ptr, done_ptr,
    band, bands, index, across, M, N, x_stride, x_scale_stride, dy_stride, dy_scale_stride, first,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """A second-phase task; the last of its columns adds up dweight and dbias."""
    TILE_N: tl.constexpr = COUNT * BLOCK
    strip(
        x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
        q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr, band_ptr,
        band, bands, index * TILE_N, M, N,
        x_stride, x_scale_stride, dy_stride, dy_scale_stride, first, across,
        COUNT, WALK, H, VEC, BLOCK, LAYOUT, STOCHASTIC, WHOLE, WAIT,
    )  # fmt: skip
    tl.debug_barrier()
    done_ptr += index
    if tl.atomic_add(done_ptr, 1, sem="acq_rel") == bands - 1:
        tl.store(done_ptr, 0)
        reduce_columns(
            partial_ptr, dweight_ptr, dbias_ptr, index * TILE_N, bands, N, TILE_N,
            max(2, 512 // TILE_N),
        )  # fmt: skip


@triton.jit
def sums_kernel(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, quads_ptr, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first phase by itself."""
    row_sums(
        x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, quads_ptr,
        tl.program_id(0) * ROWS, M, N, x_stride, x_scale_stride, dy_stride, dy_scale_stride,
        ROWS, CHUNK, BLOCK, STAGES,
    )  # fmt: skip


@triton.jit
def gradient_kernel(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, done_ptr, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The second phase by itself, last rows first, which L2 has read last."""
    across, bands = tl.cdiv(N, COUNT * BLOCK), tl.cdiv(M, WALK * BLOCK)
    pid = tl.program_id(0)
    strip_and_columns(
        x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
        q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, None, done_ptr,
        bands - 1 - pid // across, bands, pid % across, across, M, N,
        x_stride, x_scale_stride, dy_stride, dy_scale_stride, 0,
        COUNT, WALK, H, VEC, BLOCK, LAYOUT, STOCHASTIC, WHOLE, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lead"])
def backward_kernel(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, quads_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, counter_ptr, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride, lead,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Row sums, then tiles, as `tasks` orders them; a band is WALK rows of blocks.

    Counters: one a strip of columns, the ticket, one a band.
    """
    HEIGHT: tl.constexpr = WALK * BLOCK
    first: tl.constexpr = HEIGHT // ROWS
    across, bands = tl.cdiv(N, COUNT * BLOCK), tl.cdiv(M, HEIGHT)
    second, band, index = take(counter_ptr + across, bands, lead, first, across)
    band_ptr = counter_ptr + across + 1 + band
    if second:
        strip_and_columns(
            x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, quads_ptr, seed_ptr,
            q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, band_ptr,
            counter_ptr, band, bands, index, across, M, N,
            x_stride, x_scale_stride, dy_stride, dy_scale_stride, first,
            COUNT, WALK, H, VEC, BLOCK, LAYOUT, STOCHASTIC, WHOLE, True,
        )  # fmt: skip
    else:
        row_sums(
            x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, quads_ptr,
            band * HEIGHT + index * ROWS, M, N, x_stride, x_scale_stride, dy_stride,
            dy_scale_stride, ROWS, CHUNK, BLOCK, STAGES,
        )  # fmt: skip
        arrive(band_ptr)
