"""Softmax cross-entropy's gradient as per-block INT8: one tile per program, one pass over memory.

A tile without a target has its scales before any gradient: in a row the largest gradient is that of
the largest logit. So only one exponential of sixteen logits goes into them, and the logits stay
packed until they are quantised.

A tile's rows are dealt so that a thread has DEPTH neighbours of them: row h·R/DEPTH + l of the
tensor is row l·DEPTH + h of the tile. The transpose then moves words of four codes, not bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.codes import codes_nearest, codes_stochastic, draws_128
from jetfire.kernels_triton.common import (
    IGNORED,
    INTERPRETED,
    STREAM_ROUNDING,
    block_scales,
    exp,
    max_nan,
    philox_words,
)
from jetfire.kernels_triton.halves import VECTOR, row_max, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    REGISTER_SPACE,
    RegisterConfig,
    TileKernel,
    grid_origin,
    register_limit,
    store_tile,
    tile_grid,
)

# Below 127/amax, so that what an exponential is off by takes no product below -127.
LESS = tl.constexpr(1 - 2.0**-19)


@triton.jit
def labels(targets_ptr, lse_ptr, dloss_ptr, rows, M, VALID):
    """Load of rows: which of them to read, the target's column or less than 0, lse and dloss.

    Those that are ignored or beyond the matrix are not read. A dloss is NaN where the target is no
    column.
    """
    target = tl.load(targets_ptr + rows, mask=rows < M, other=IGNORED)
    known = (target >= 0) & (target < VALID)
    at = tl.where(known, target, tl.where(target == IGNORED, IGNORED, -1)).to(tl.int32)
    read = at != IGNORED
    lse = tl.load(lse_ptr + rows, mask=read, other=0.0)
    dloss = tl.load(dloss_ptr + rows, mask=read, other=0.0)
    return read, at, lse, tl.where(at == -1, float("nan"), dloss)


@triton.jit
def minus_one_hot(x, at, lse, cols, VALID):
    """Return exp(x − lse) − [column = at], 0 in the padding; fp32."""
    p = exp(widen(x) - lse[:, None])
    p = tl.where(cols[None, :] == at[:, None], p - 1.0, p)
    return tl.where((cols < VALID)[None, :], p, 0.0)


@triton.jit
def repeated_max(x):
    """Return in place of each element the largest of its VECTOR neighbours: [R, C], fp32."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    most = row_max(x)[:, :, None]
    return tl.reshape(tl.broadcast_to(most, (R, C // VECTOR, VECTOR)), (R, C))


@triton.jit
def dealt_amax(x, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Return max|x| of each block of a dealt tile, NaN or ∞ where it holds NaN; registers first."""
    DOWN: tl.constexpr = x.shape[0] // BLOCK
    ACROSS: tl.constexpr = x.shape[1] // BLOCK
    blocks = tl.reshape(tl.abs(x), (DEPTH, DOWN, BLOCK // DEPTH, ACROSS, BLOCK))
    if INTERPRETED:
        blocks = tl.where(blocks == blocks, blocks, float("inf"))
        return tl.max(tl.max(tl.max(blocks, 0), 3), 1)
    return tl.reduce(tl.reduce(tl.reduce(blocks, 0, max_nan), 3, max_nan), 1, max_nan)


@triton.jit
def spread_dealt(blocks, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Repeat each block's value at each of its elements in a dealt tile."""
    DOWN: tl.constexpr = blocks.shape[0]
    ACROSS: tl.constexpr = blocks.shape[1]
    wide = blocks[None, :, None, :, None]
    wide = tl.broadcast_to(wide, (DEPTH, DOWN, BLOCK // DEPTH, ACROSS, BLOCK))
    return tl.reshape(wide, (DOWN * BLOCK, ACROSS * BLOCK))


@triton.jit
def draws_at(seed, rows, col0, C: tl.constexpr):
    """Return 128 + u of each element of C columns of rows: u as `random_words` has its bits."""
    R: tl.constexpr = rows.shape[0]
    groups = (col0 // 8 + 2 * tl.arange(0, C // 16)).to(tl.uint32)
    c0 = tl.broadcast_to(groups[None, :], (R, C // 16))
    c1 = tl.broadcast_to(rows.to(tl.uint32)[:, None], (R, C // 16))
    a0, a1, a2, a3 = philox_words(seed, c0, c1, STREAM_ROUNDING)
    b0, b1, b2, b3 = philox_words(seed, c0 + 1, c1, STREAM_ROUNDING)
    draws = draws_128(tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3))
    return tl.reshape(draws, (R, C))


@triton.jit
def draw_at(seed, rows, at):
    """Return 128 + u of the element of each row in the column that is given for it."""
    w0, w1, w2, w3 = philox_words(
        seed, (at // 8).to(tl.uint32), rows.to(tl.uint32), STREAM_ROUNDING
    )
    half = at % 8
    word = tl.where(half < 4, tl.where(half < 2, w0, w1), tl.where(half < 6, w2, w3))
    bits = tl.where(half % 2 == 0, word, word >> 16) & 0xFFFF
    return 128.0 + bits.to(tl.float32) * 1.52587890625e-05


@triton.jit
def masked(q, keep):
    """Return int8 codes where keep is -1, and 0 where it is 0: four at once."""
    if INTERPRETED:
        return q & keep
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [q, keep], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def codes(value, factor, keep, draws, STOCHASTIC: tl.constexpr):
    """Return value·factor as int8, where keep is -1; elsewhere 0, whatever the product is."""
    if INTERPRETED:
        # NumPy warns of what is too large to convert; such a code is masked, or not the last.
        value = tl.where((keep != 0) & (tl.abs(value * factor) < 128.0), value, 0.0)
    if STOCHASTIC:
        return masked(codes_stochastic(value, factor * LESS, draws), keep)
    return masked(codes_nearest(value, factor), keep)


@triton.jit
def limited(factor):
    """Return multiplier times dloss, cut off where it is too large for fp32, or NaN."""
    return tl.minimum(tl.maximum(factor, -(2.0**127)), 2.0**127)


@triton.jit
def store_padding(
    q_ptr,
    qt_ptr,
    row0,
    col0,
    M,
    N,
    VALID,
    R: tl.constexpr,
    C: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write 0 over the codes of a tile's columns from VALID on."""
    rows, cols = row0 + tl.arange(0, R)[:, None], col0 + tl.arange(0, C)[None, :]
    mask = (rows < M) & (cols >= VALID) & (cols < N)
    zeros = tl.zeros((R, C), tl.int8)
    if LAYOUT != "qt":
        tl.store(q_ptr + (rows.to(tl.int64) * N + cols), zeros, mask=mask)
    if LAYOUT != "q":
        tl.store(qt_ptr + (cols.to(tl.int64) * M + rows), zeros, mask=mask)


@triton.jit
def store_targets(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    dloss_ptr,
    q_ptr,
    qt_ptr,
    rows,
    multiplier,
    seed,
    col0,
    M,
    N,
    VALID,
    stride,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the codes of p − 1 over those of p at the targets in a tile's columns.

    Rows' labels are loaded once more, for all else keeps them in no register.
    """
    R: tl.constexpr = rows.shape[0]
    DOWN: tl.constexpr = multiplier.shape[0]
    ACROSS: tl.constexpr = multiplier.shape[1]
    _, at, lse, dloss = labels(targets_ptr, lse_ptr, dloss_ptr, rows, M, VALID)
    here = (at >= col0) & (at < col0 + TILE_N)
    lines = rows.to(tl.int64)
    x = tl.load(logits_ptr + lines * stride + at, mask=here, other=0).to(tl.float32)
    shape: tl.constexpr = (DEPTH, DOWN, BLOCK // DEPTH, ACROSS)
    by_row = tl.reshape(tl.broadcast_to(multiplier[None, :, None, :], shape), (R, ACROSS))
    block = (at - col0) // BLOCK
    by_row = tl.where(block[:, None] == tl.arange(0, ACROSS)[None, :], by_row, 0.0)
    by_row = tl.sum(by_row, 1)
    draws = at
    if STOCHASTIC:
        draws = draw_at(seed, rows, at)
    keep = tl.where(by_row != 0, -1, 0).to(tl.int8)
    q = codes(exp(x - lse) - 1.0, limited(by_row * dloss), keep, draws, STOCHASTIC)
    if LAYOUT != "qt":
        tl.store(q_ptr + lines * N + at, q, mask=here)
    if LAYOUT != "q":
        tl.store(qt_ptr + at.to(tl.int64) * M + rows, q, mask=here)


@triton.jit
def store_dealt(
    q,
    scale,
    rows,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    row0,
    col0,
    M,
    N,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write a dealt tile's codes and scales, as `store_quantised` does those of a tile."""
    R: tl.constexpr = q.shape[0]
    C: tl.constexpr = q.shape[1]
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    block_row, block_col = row0 // BLOCK, col0 // BLOCK
    if LAYOUT != "qt":
        cols = col0 + tl.arange(0, C)
        offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(q_ptr + offsets, q, mask=(rows < M)[:, None] & (cols < N)[None, :])
        store_tile(scale_ptr, scale, block_row, block_col, down, across, across)
    if LAYOUT != "q":
        turned = tl.permute(tl.reshape(q, (DEPTH, R // DEPTH, C)), (2, 1, 0))
        store_tile(qt_ptr, tl.reshape(turned, (C, R)), col0, row0, N, M, M)
        store_tile(scale_t_ptr, tl.trans(scale), block_col, block_row, across, down, down)


@triton.jit(do_not_specialize=["VALID"])
def quantize_dlogits_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    dloss_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    VALID,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    dealt = tl.arange(0, TILE_M)
    rows = row0 + dealt % (TILE_M // DEPTH) * DEPTH + dealt // (TILE_M // DEPTH)
    cols = col0 + tl.arange(0, TILE_N)
    read, at, lse, dloss = labels(targets_ptr, lse_ptr, dloss_ptr, rows, M, VALID)
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    x = tl.load(logits_ptr + offsets, mask=read[:, None] & (cols < N)[None, :], other=0)
    targets = tl.max(((at >= col0) & (at < col0 + TILE_N)).to(tl.int32), 0) > 0
    if targets | (col0 + TILE_N > VALID):
        most = minus_one_hot(x, at, lse, cols, VALID) * dloss[:, None]
        amax = dealt_amax(most, BLOCK, DEPTH)
        # Blocks of the padding alone are 0 beside a row that is NaN, too.
        first = col0 + tl.arange(0, TILE_N // BLOCK) * BLOCK
        amax = tl.where((first < VALID)[None, :], amax, 0.0)
    else:
        most = exp(repeated_max(x) - lse[:, None]) * dloss[:, None]
        amax = dealt_amax(most, BLOCK, DEPTH)
    scale, multiplier = block_scales(amax)
    factor = limited(spread_dealt(multiplier, BLOCK, DEPTH) * dloss[:, None])
    keep = spread_dealt(tl.where(multiplier != 0, -1, 0).to(tl.int8), BLOCK, DEPTH)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    draws = draws_at(seed, rows, col0, TILE_N) if STOCHASTIC else factor
    q = codes(exp(widen(x) - lse[:, None]), factor, keep, draws, STOCHASTIC)
    store_dealt(
        q,
        scale,
        rows,
        q_ptr,
        scale_ptr,
        qt_ptr,
        scale_t_ptr,
        row0,
        col0,
        M,
        N,
        BLOCK,
        LAYOUT,
        DEPTH,
    )
    # The later code of an element is the one that stays.
    if col0 + TILE_N > VALID:
        tl.debug_barrier()
        store_padding(q_ptr, qt_ptr, row0, col0, M, N, VALID, TILE_M, TILE_N, LAYOUT)
    if targets:
        tl.debug_barrier()
        store_targets(
            logits_ptr,
            targets_ptr,
            lse_ptr,
            dloss_ptr,
            q_ptr,
            qt_ptr,
            rows,
            multiplier,
            seed,
            col0,
            M,
            N,
            VALID,
            stride,
            TILE_N,
            BLOCK,
            LAYOUT,
            STOCHASTIC,
            DEPTH,
        )


def depth(config: RegisterConfig) -> int:
    """Return how many rows of a tile a thread has, at most the four whose codes make a word.

    Triton gives a thread 16 neighbours of a row, and the highest bits of the row number.
    """
    across = min(32 * config.warps, config.tile_n // 16)
    return max(1, min(4, config.tile_m * across // (32 * config.warps)))


class TritonQuantizeDlogits(TileKernel):
    op = "quantize_dlogits"
    Config = RegisterConfig
    choices = REGISTER_SPACE

    def default(self, problem: Any, device: Device) -> RegisterConfig:
        """Return a tile like `quantize`'s and the least registers that spill nothing.

        Of them 80 let 24 warps share an SM of Hopper, 96 and 128 let 16. On an H200
        16384×50304, stochastic, both ways, takes 959 µs with 80, and 943 with 64, which spill.
        """
        block, layout = problem.block, problem.layout
        if problem.dtype == "fp32":
            return RegisterConfig(128, 128, 16) if block == 128 else RegisterConfig(64, 64, 4)
        registers = 80
        if device.capability != (9, 0):
            registers = 255
        elif problem.dtype == "fp16" or layout == "qt":
            registers = 128
        elif layout == "both" and (problem.rounding == "nearest" or block == 32):
            registers = 96
        side, warps = (128, 8) if block == 128 else (64, 4)
        return RegisterConfig(side, 128, warps, registers)

    def launches(self, problem: Any, config: RegisterConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        given = {"VALID": problem.columns, "DEPTH": depth(config)}
        given |= {**EXACT, **register_limit(config)}
        return (Launch(quantize_dlogits_kernel, grid, problem, config, **given),)


KERNELS = (TritonQuantizeDlogits(),)
