"""LayerNorm backward: two sums over each row, then tiles of dx with the sums over columns."""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import quantize_tile, spread
from jetfire.kernels_triton.gelu.packed import codes_to_floats
from jetfire.kernels_triton.layernorm.forward import load_codes
from jetfire.kernels_triton.layernorm.tasks import arrive, leave, take, wait
from jetfire.kernels_triton.tiles import load_tile, store_quantised


@triton.jit
def load_rows(
    q_ptr, scale_ptr, row0, col0, M, N, stride, scale_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes as fp32 and scales, both [ROWS, CHUNK], of rows that lie in one row of blocks."""
    q = codes_to_floats(load_tile(q_ptr, row0, col0, M, N, stride, ROWS, CHUNK))
    scale = load_tile(
        scale_ptr, row0 // BLOCK, col0 // BLOCK, tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK),
        scale_stride, 1, CHUNK // BLOCK,
    )  # fmt: skip
    wide = tl.broadcast_to(scale[:, :, None], (1, CHUNK // BLOCK, BLOCK))
    return q, tl.reshape(wide, (1, CHUNK))


@triton.jit
def row_sums(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr, row0, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean(g) and mean(g·x̂) of ROWS whole rows, g = dy·weight; to sums_ptr [2, M]."""
    rows = row0 + tl.arange(0, ROWS)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    shift = (mean * rstd)[:, None]
    plain = tl.zeros((ROWS, CHUNK), tl.float32)
    along = tl.zeros((ROWS, CHUNK), tl.float32)
    for col0 in range(0, N, CHUNK):
        x, x_scale = load_rows(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, ROWS, CHUNK, BLOCK
        )
        dy, dy_scale = load_rows(
            dy_ptr, dy_scale_ptr, row0, col0, M, N, dy_stride, dy_scale_stride, ROWS, CHUNK, BLOCK
        )
        cols = col0 + tl.arange(0, CHUNK)
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)[None, :]
        g = dy * (dy_scale * weight)
        plain += g
        along += g * (x * (x_scale * rstd[:, None]) - shift)
    tl.store(sums_ptr + rows, tl.sum(plain, 1) / N, mask=rows < M)
    tl.store(sums_ptr + M.to(tl.int64) + rows, tl.sum(along, 1) / N, mask=rows < M)


@triton.jit
def gradient_tile(
    x, x_scale, dy, dy_scale, weight, mean_ptr, rstd_ptr, sums_ptr, row0, col0, M, N,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx of one tile, and the tile's part of dweight and dbias, [TILE_N] each."""
    rows = row0 + tl.arange(0, TILE_M)
    inside = rows < M
    mean = tl.load(mean_ptr + rows, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
    plain = tl.load(sums_ptr + rows, mask=inside, other=0.0, cache_modifier=".cg")
    along = tl.load(sums_ptr + M.to(tl.int64) + rows, mask=inside, other=0.0, cache_modifier=".cg")
    xhat = codes_to_floats(x) * (spread(x_scale, BLOCK) * rstd[:, None]) - (mean * rstd)[:, None]
    dy = codes_to_floats(dy) * spread(dy_scale, BLOCK)
    dx = (dy * weight[None, :]) * rstd[:, None] - (plain * rstd)[:, None]
    dx -= xhat * (along * rstd)[:, None]
    if not WHOLE:  # columns beyond the last would hold the rows' sums
        dx = tl.where((col0 + tl.arange(0, TILE_N) < N)[None, :], dx, 0.0)
    return dx, tl.sum(dy * xhat, 0), tl.sum(dy, 0)


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
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr, counter_ptr, band, bands, col0, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride, first, across,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, WALK: tl.constexpr, BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WALK tiles of a band, one below the other: dx, and the band's part of the column sums."""
    cols = col0 + tl.arange(0, TILE_N)
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    dweight = tl.zeros((TILE_N,), tl.float32)
    dbias = tl.zeros((TILE_N,), tl.float32)
    for i in range(WALK):
        row0 = (band * WALK + i) * TILE_M
        x, x_scale = load_codes(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
        )
        dy, dy_scale = load_codes(
            dy_ptr, dy_scale_ptr, row0, col0, M, N, dy_stride, dy_scale_stride, TILE_M, TILE_N,
            BLOCK,
        )  # fmt: skip
        if i == 0:
            wait(counter_ptr, first)
            leave(counter_ptr, first, across)
        dx, part_weight, part_bias = gradient_tile(
            x, x_scale, dy, dy_scale, weight, mean_ptr, rstd_ptr, sums_ptr, row0, col0, M, N,
            TILE_M, TILE_N, BLOCK, WHOLE,
        )  # fmt: skip
        dweight += part_weight
        dbias += part_bias
        q, scale = quantize_tile(dx, seed, row0, col0, BLOCK, STOCHASTIC)
        store_quantised(
            q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
        )
    at = partial_ptr + band.to(tl.int64) * N + cols
    tl.store(at, dweight, mask=cols < N)
    tl.store(at + bands.to(tl.int64) * N, dbias, mask=cols < N)


@triton.jit
def backward_kernel(
    x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, dweight_ptr, dbias_ptr, partial_ptr, counter_ptr, M, N,
    x_stride, x_scale_stride, dy_stride, dy_scale_stride, lead,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, WALK: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Counters: the ticket, one a band, one a strip of columns."""
    first: tl.constexpr = TILE_M * WALK // ROWS
    bands, across = tl.cdiv(M, TILE_M * WALK), tl.cdiv(N, TILE_N)
    second, band, index = take(counter_ptr, bands, lead, first, across)
    if second:
        strip(
            x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr,
            seed_ptr, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, partial_ptr, counter_ptr + 1 + band,
            band, bands, index * TILE_N, M, N,
            x_stride, x_scale_stride, dy_stride, dy_scale_stride, first, across,
            TILE_M, TILE_N, WALK, BLOCK, LAYOUT, STOCHASTIC, WHOLE,
        )  # fmt: skip
        tl.debug_barrier()
        done_ptr = counter_ptr + 1 + bands + index
        if tl.atomic_add(done_ptr, 1, sem="acq_rel") == bands - 1:
            tl.store(done_ptr, 0)
            reduce_columns(
                partial_ptr, dweight_ptr, dbias_ptr, index * TILE_N, bands, N, TILE_N,
                2048 // TILE_N,
            )  # fmt: skip
    else:
        row_sums(
            x_ptr, x_scale_ptr, dy_ptr, dy_scale_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr,
            band * (TILE_M * WALK) + index * ROWS, M, N, x_stride, x_scale_stride, dy_stride,
            dy_scale_stride, ROWS, CHUNK, BLOCK,
        )  # fmt: skip
        arrive(counter_ptr + 1 + band)
