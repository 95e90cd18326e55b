"""LayerNorm forward: row statistics from integer sums, then one tile a program."""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import quantize_tile, spread
from jetfire.kernels_triton.gelu.packed import codes_to_floats
from jetfire.kernels_triton.layernorm.tasks import arrive, leave, take, wait
from jetfire.kernels_triton.tiles import load_tile, store_quantised, tile_origin


@triton.jit
def row_statistics(
    x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, row0, M, N, x_stride, scale_stride, eps,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and rstd of ROWS whole rows that lie in one row of blocks.

    Σq and Σq² of a row of a block are integers below 2^24, so fp32 sums them exactly, and
    count·Σq² − (Σq)² fits int32: a block's mean and squared deviation carry no error but their
    last rounding. Blocks are combined as Chan, Golub and LeVeque do ("Updating formulae and a
    pairwise algorithm for computing sample variances", 1979, equation 2.1).
    """
    SLOTS: tl.constexpr = CHUNK // BLOCK
    rows = row0 + tl.arange(0, ROWS)
    slots = tl.arange(0, SLOTS)
    count = tl.zeros((1, SLOTS), tl.float32)
    mean = tl.zeros((ROWS, SLOTS), tl.float32)
    square = tl.zeros((ROWS, SLOTS), tl.float32)
    for col0 in range(0, N, CHUNK):
        q = load_tile(x_ptr, row0, col0, M, N, x_stride, ROWS, CHUNK)
        q = tl.reshape(codes_to_floats(q), (ROWS, SLOTS, BLOCK))
        block = col0 // BLOCK + slots
        at = x_scale_ptr + (row0 // BLOCK).to(tl.int64) * scale_stride + block
        scale = tl.load(at, mask=block * BLOCK < N, other=0.0)[None, :]
        fresh = tl.minimum(tl.maximum(N - block * BLOCK, 0), BLOCK)[None, :]
        some = tl.maximum(fresh, 1).to(tl.float32)
        sum1 = tl.sum(q, 2)
        whole = sum1.to(tl.int32)
        spreads = (tl.sum(q * q, 2).to(tl.int32) * fresh - whole * whole).to(tl.float32)
        total = count + fresh
        ratio = fresh / tl.maximum(total, 1)
        step = scale * (sum1 / some) - mean
        square += scale * scale * (spreads / some) + step * step * (count * ratio)
        mean += step * ratio
        count = total
    row_mean = tl.sum(mean * count, 1) / N
    deviation = mean - row_mean[:, None]
    variance = tl.sum(square + deviation * deviation * count, 1) / N
    tl.store(mean_ptr + rows, row_mean, mask=rows < M)
    tl.store(rstd_ptr + rows, tl.rsqrt(variance + eps), mask=rows < M)


@triton.jit
def load_codes(
    q_ptr, scale_ptr, row0, col0, M, N, stride, scale_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's codes, int8 [TILE_M, TILE_N], and scales, fp32 [TILE_M/BLOCK, TILE_N/BLOCK]."""
    q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    scale = load_tile(
        scale_ptr, row0 // BLOCK, col0 // BLOCK, tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK),
        scale_stride, TILE_M // BLOCK, TILE_N // BLOCK,
    )  # fmt: skip
    return q, scale


@triton.jit
def normalise_tile(
    x, x_scale, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Normalise, quantise and write one tile of codes."""
    rows = row0 + tl.arange(0, TILE_M)
    cols = col0 + tl.arange(0, TILE_N)
    mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0, cache_modifier=".cg")
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0, cache_modifier=".cg")
    weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    step = spread(x_scale, BLOCK) * rstd[:, None]
    xhat = codes_to_floats(x) * step - (mean * rstd)[:, None]
    y = xhat * weight[None, :] + bias[None, :]
    if not WHOLE:  # rows beyond the last would hold the bias
        y = tl.where((rows < M)[:, None], y, 0.0)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    q, scale = quantize_tile(y, seed, row0, col0, BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
    )


@triton.jit
def given_kernel(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, x_stride, scale_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Statistics are inputs: a program is a tile."""
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    x, x_scale = load_codes(
        x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, scale_stride, TILE_M, TILE_N, BLOCK
    )
    normalise_tile(
        x, x_scale, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, seed_ptr,
        q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N,
        TILE_M, TILE_N, BLOCK, LAYOUT, STOCHASTIC, WHOLE,
    )  # fmt: skip


@triton.jit
def row_kernel(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, counter_ptr, M, N, x_stride, scale_stride, eps, lead,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Statistics of whole rows, then tiles, as `tasks` orders them; a band is a row of tiles.

    Counters: the ticket, one a band.
    """
    first: tl.constexpr = TILE_M // ROWS
    across = tl.cdiv(N, TILE_N)
    second, band, index = take(counter_ptr, tl.cdiv(M, TILE_M), lead, first, across)
    row0, col0 = band * TILE_M, index * TILE_N
    if second:
        x, x_scale = load_codes(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, scale_stride, TILE_M, TILE_N, BLOCK
        )
        wait(counter_ptr + 1 + band, first)
        leave(counter_ptr + 1 + band, first, across)
        normalise_tile(
            x, x_scale, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, seed_ptr,
            q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N,
            TILE_M, TILE_N, BLOCK, LAYOUT, STOCHASTIC, WHOLE,
        )  # fmt: skip
    else:
        row_statistics(
            x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, row0 + index * ROWS, M, N, x_stride,
            scale_stride, eps, ROWS, CHUNK, BLOCK,
        )  # fmt: skip
        arrive(counter_ptr + 1 + band)
