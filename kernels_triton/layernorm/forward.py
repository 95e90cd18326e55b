"""LayerNorm forward: row statistics from integer sums, then one tile a program."""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import INTERPRETED
from jetfire.kernels_triton.gelu.packed import codes_to_floats
from jetfire.kernels_triton.layernorm.blocks import (
    block_cols,
    block_rows,
    load_columns,
    load_scales,
    store_blocks,
)
from jetfire.kernels_triton.layernorm.tasks import arrive, leave, take, wait
from jetfire.kernels_triton.tiles import load_tile, tile_origin


@triton.jit
def sums_of_words(words):
    """Σq and Σq² of the four codes in each 32-bit word."""
    if INTERPRETED:
        plain = tl.zeros(words.shape, tl.int32)
        square = tl.zeros(words.shape, tl.int32)
        for i in tl.static_range(4):
            q = words << (24 - 8 * i) >> 24
            plain += q
            square += q * q
        return plain, square
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $2, 0x01010101, 0; dp4a.s32.s32 $1, $2, $2, 0;",
        "=&r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sums_of_run(
    x_ptr, row0, col0, M, N, x_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Σq and Σq² of every RUN columns: int32 [ROWS, CHUNK/RUN] each.

    WORDS: x_ptr, N, col0 and the stride count words of four codes.
    """
    each: tl.constexpr = RUN // 4 if WORDS else RUN
    if WORDS:
        words = load_tile(x_ptr, row0, col0, M, N, x_stride, ROWS, CHUNK // 4)
        plain, square = sums_of_words(words)
    else:
        plain = load_tile(x_ptr, row0, col0, M, N, x_stride, ROWS, CHUNK).to(tl.int32)
        square = plain * plain
    plain = tl.sum(tl.reshape(plain, (ROWS, CHUNK // RUN, each)), 2)
    return plain, tl.sum(tl.reshape(square, (ROWS, CHUNK // RUN, each)), 2)


@triton.jit
def row_statistics(
    x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, row0, M, N, x_stride, scale_stride, eps,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Mean and rstd of ROWS whole rows that lie in one row of blocks.

    Sixteen neighbours (a thread's load) share a scale: the sums of their codes and squared codes
    are integers, and so is 16·Σq² − (Σq)², so their mean and squared deviation carry no error but
    their last rounding. They are combined as Chan, Golub and LeVeque do ("Updating formulae and a
    pairwise algorithm for computing sample variances", 1979, equation 2.1).
    """
    RUN: tl.constexpr = 16
    RUNS: tl.constexpr = CHUNK // RUN
    PACK: tl.constexpr = 4 if WORDS else 1
    rows = row0 + tl.arange(0, ROWS)
    scale_ptr = x_scale_ptr + (row0 // BLOCK).to(tl.int64) * scale_stride
    if WORDS:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    count = tl.zeros((1, RUNS), tl.float32)
    mean = tl.zeros((ROWS, RUNS), tl.float32)
    square = tl.zeros((ROWS, RUNS), tl.float32)
    for col0 in tl.range(0, N, CHUNK, num_stages=STAGES):
        plain, squares = sums_of_run(
            x_ptr, row0, col0 // PACK, M, N // PACK, x_stride // PACK, ROWS, CHUNK, RUN, WORDS
        )
        cols = col0 + tl.arange(0, RUNS) * RUN
        scale = tl.load(scale_ptr + cols // BLOCK, mask=cols < N, other=0.0)[None, :]
        fresh = tl.minimum(tl.maximum(N - cols, 0), RUN)[None, :]
        some = tl.maximum(fresh, 1).to(tl.float32)
        step = (scale / some) * plain.to(tl.float32) - mean
        spreads = (squares * fresh - plain * plain).to(tl.float32)
        total = count + fresh
        ratio = fresh / tl.maximum(total, 1.0)
        square += (scale * scale / some) * spreads + step * step * (count * ratio)
        mean += step * ratio
        count = total
    row_mean = tl.sum(mean * count, 1) / N
    deviation = mean - row_mean[:, None]
    variance = tl.sum(square + deviation * deviation * count, 1) / N
    tl.store(mean_ptr + rows, row_mean, mask=rows < M)
    tl.store(rstd_ptr + rows, tl.rsqrt(variance + eps), mask=rows < M)


@triton.jit
def normalise(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, counter_ptr, first_row, col0, M, N, x_stride,
    scale_stride, first, across,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """Normalise and quantise WALK rows of COUNT blocks, one below the other."""
    L: tl.constexpr = BLOCK // H
    V: tl.constexpr = BLOCK // VEC
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    cols = col0 + block_cols(COUNT, V, VEC)
    weight = load_columns(weight_ptr, col0, N, COUNT, V, VEC)
    bias = load_columns(bias_ptr, col0, N, COUNT, V, VEC)
    if not GIVEN:
        wait(counter_ptr, first)
        leave(counter_ptr, first, across)
    for i in range(WALK):
        row0 = first_row + i * BLOCK
        rows = row0 + block_rows(H, L)
        inside = (rows < M) & (cols < N)
        x = tl.load(x_ptr + (rows.to(tl.int64) * x_stride + cols), mask=inside, other=0)
        x_scale = load_scales(x_scale_ptr, row0, col0, M, N, scale_stride, COUNT, BLOCK)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0, cache_modifier=".cg")
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0, cache_modifier=".cg")
        y = codes_to_floats(x) * (x_scale * rstd) - mean * rstd
        y = y * weight + bias
        if not WHOLE:  # rows beyond the last would hold the bias
            y = tl.where(rows < M, y, 0.0)
        store_blocks(
            y, seed, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, rows, cols,
            inside, M, N, BLOCK, LAYOUT, STOCHASTIC,
        )  # fmt: skip


@triton.jit
def statistics_kernel(
    x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, M, N, x_stride, scale_stride, eps,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The first phase by itself."""
    row_statistics(
        x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, tl.program_id(0) * ROWS, M, N, x_stride,
        scale_stride, eps, ROWS, CHUNK, BLOCK, WORDS, STAGES,
    )  # fmt: skip


@triton.jit
def given_kernel(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, M, N, x_stride, scale_stride,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    UPWARDS: tl.constexpr,
):  # fmt: skip
    """Statistics are there. UPWARDS: last rows first, which L2 has read last."""
    row0, col0 = tile_origin(N, WALK * BLOCK, COUNT * BLOCK)
    if UPWARDS:
        row0 = (tl.cdiv(M, WALK * BLOCK) - 1) * (WALK * BLOCK) - row0
    normalise(
        x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
        q_ptr, scale_ptr, qt_ptr, scale_t_ptr, None, row0, col0, M, N, x_stride, scale_stride,
        0, 0, COUNT, WALK, H, VEC, BLOCK, LAYOUT, STOCHASTIC, WHOLE, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lead"])
def row_kernel(
    x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
    q_ptr, scale_ptr, qt_ptr, scale_t_ptr, counter_ptr, M, N, x_stride, scale_stride, eps, lead,
    COUNT: tl.constexpr, WALK: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics of whole rows, then tiles, as `tasks` orders them; a band is WALK rows of blocks.

    Counters: the ticket, one a band.
    """
    HEIGHT: tl.constexpr = WALK * BLOCK
    first: tl.constexpr = HEIGHT // ROWS
    across = tl.cdiv(N, COUNT * BLOCK)
    second, band, index = take(counter_ptr, tl.cdiv(M, HEIGHT), lead, first, across)
    if second:
        normalise(
            x_ptr, x_scale_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, seed_ptr,
            q_ptr, scale_ptr, qt_ptr, scale_t_ptr, counter_ptr + 1 + band, band * HEIGHT,
            index * (COUNT * BLOCK), M, N, x_stride, scale_stride, first, across,
            COUNT, WALK, H, VEC, BLOCK, LAYOUT, STOCHASTIC, WHOLE, False,
        )  # fmt: skip
    else:
        row_statistics(
            x_ptr, x_scale_ptr, mean_ptr, rstd_ptr, band * HEIGHT + index * ROWS, M, N, x_stride,
            scale_stride, eps, ROWS, CHUNK, BLOCK, WORDS, STAGES,
        )  # fmt: skip
        arrive(counter_ptr + 1 + band)
