"""Leverage-score sampling: a launch that weighs the rows, and one that draws them.

Nearly all the time is latency. What needs all rows (the largest score, the water-filling, the sum
of the chances before a program's rows) each program works out for itself: 16384 weights are 64 KiB
that each reads from the L2 cache and then holds in registers, which takes less than waiting for
another program. What costs instructions (roots, divisions, a prefix sum) it does for its own rows.
Both products' draws share the two launches: axis 1 of the grid is the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.common import INTERPRETED, philox_words, random_u16
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import device_reason, power_reason, share_reason, warps_reason

# As in jetfire.reference: philox's stream, and sample_rows's constants.
STREAM_SAMPLING = tl.constexpr(2)
ONE = tl.constexpr(1 << 32)
HIGH = tl.constexpr(14)
SEGMENT = tl.constexpr(128)
LEAST_DGRAD = tl.constexpr(1)
LEAST_WGRAD = tl.constexpr(1 << 28)
MOST_HELD = 16384  # rows at a time: twice as many spill, however many warps share them
MOST_TOKENS = 1 << 28  # twice a row number stays in int32


@dataclass(frozen=True)
class SampleRowsConfig(Config):
    """Programs of `warps` warps: each decides for `rows` rows and adds up all, `tile` at a time."""

    tile: int = 16384
    rows: int = 1024
    warps: int = 8


@triton.jit
def scores(squares_ptr, x_squares_ptr, rows, M, TOTAL, PARTS: tl.constexpr, WGRAD: tl.constexpr):
    """Return c²·‖g‖² of these rows, times ‖x‖² of their tokens: int64, 0 beyond the last."""
    inside = rows < TOTAL
    found = tl.load(squares_ptr + rows, mask=inside, other=0).to(tl.int64)
    if WGRAD:
        tokens = tl.where(rows < M, rows, rows - M)
        found *= tl.load(x_squares_ptr + tokens, mask=inside, other=0)
    if PARTS == 2:
        found = tl.where(rows < M, found * (HIGH * HIGH), found)
    return found


@triton.jit
def weigh_kernel(
    squares_ptr,
    x_squares_ptr,
    w_ptr,
    M,
    TOTAL,
    PARTS: tl.constexpr,
    WGRAD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write w: square roots of the scores in units of their largest's 2^-30, rounded up."""
    largest = tl.full((), 1, tl.int64)
    for first in range(0, TOTAL, TILE):
        rows = first + tl.arange(0, TILE)
        score = scores(squares_ptr, x_squares_ptr, rows, M, TOTAL, PARTS, WGRAD)
        largest = tl.maximum(largest, tl.max(score, 0))
    unit = 1073741824.0 / tl.sqrt(largest.to(tl.float64))
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    score = scores(squares_ptr, x_squares_ptr, rows, M, TOTAL, PARTS, WGRAD)
    w = tl.ceil(tl.sqrt(score.to(tl.float64)) * unit).to(tl.int32)
    tl.store(w_ptr + rows, w, mask=rows < TOTAL)


@triton.jit
def weigh_both_kernel(
    squares_ptr,
    x_squares_ptr,
    w_ptr,
    M,
    TOTAL,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write each product's weights, wgrad's after dgrad's."""
    if tl.program_id(1) == 0:
        weigh_kernel(squares_ptr, x_squares_ptr, w_ptr, M, TOTAL, PARTS, False, TILE, ROWS)
    else:
        weigh_kernel(squares_ptr, x_squares_ptr, w_ptr + TOTAL, M, TOTAL, PARTS, True, TILE, ROWS)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b):
    """Add up two tensors in one pass."""
    if INTERPRETED:  # whose own sum is NumPy's, any other a Python loop
        return tl.sum(a, 0), tl.sum(b, 0)
    return tl.reduce((a, b), 0, add_pairs)


@triton.jit
def weights(
    w_ptr,
    x_squares_ptr,
    rows,
    M,
    TOTAL,
    PARTS: tl.constexpr,
    WGRAD: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Load the weights of these rows, int32: as `weigh_kernel` left them if SAMPLED.

    Otherwise w_ptr holds squares, and a row that is not zero has weight 1.
    """
    if SAMPLED:
        return tl.load(w_ptr + rows, mask=rows < TOTAL, other=0)
    score = scores(w_ptr, x_squares_ptr, rows, M, TOTAL, PARTS, WGRAD)
    return (score > 0).to(tl.int32)


@triton.jit
def chances(w, level, ratio, LEAST: tl.constexpr, SAMPLED: tl.constexpr):
    """Return these weights' probabilities in units of 2^-32: 1 from the level upwards."""
    if not SAMPLED:
        return tl.where(w >= level, ONE, 0)
    # Below the level w·ratio is below 2^32, by more than it may be rounded by. As the low word of
    # 2^52 + w an integer is converted at the rate of an addition, where I2F takes four times that.
    below = (tl.minimum(w, level - 1).to(tl.int64) | 0x4330000000000000).to(
        tl.float64, bitcast=True
    )
    part = ((below - 4503599627370496.0) * ratio).to(tl.uint32)
    part = tl.where(w > 0, tl.maximum(part, LEAST), 0)
    return tl.where(w >= level, ONE, part.to(tl.int64))


@triton.jit
def first_word(seed):
    """Return the word at counter (0, 0, 0, STREAM_SAMPLING), in an int64."""
    zero = tl.zeros((1,), tl.uint32)
    word, _, _, _ = philox_words(seed, zero, zero, STREAM_SAMPLING)
    return tl.sum(word.to(tl.int64), 0)


@triton.jit
def segment_end(count):
    return (count + SEGMENT - 1) // SEGMENT * SEGMENT


@triton.jit
def pad(rows_ptr, weight_ptr, repeat_ptr, first, end, WGRAD: tl.constexpr):
    """Write rows -1, which count nothing, from `first` to `end` of the buffer."""
    for start in range(first, end, SEGMENT):
        at = start + tl.arange(0, SEGMENT)
        tl.store(rows_ptr + at, -1, mask=at < end)
        if WGRAD:
            tl.store(repeat_ptr + at, 0, mask=at < end)
        else:
            tl.store(weight_ptr + at, 0.0, mask=at < end)


@triton.jit
def draw_kernel(
    w_ptr,
    x_squares_ptr,
    seed_ptr,
    rows_ptr,
    counts_ptr,
    weight_ptr,
    slots_ptr,
    repeat_ptr,
    M,
    TOTAL,
    ROOM,
    PARTS: tl.constexpr,
    WGRAD: tl.constexpr,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Draw a program's rows; HELD: TILE covers all rows, whose weights stay in registers."""
    LEAST: tl.constexpr = LEAST_WGRAD if WGRAD else LEAST_DGRAD
    own = tl.program_id(0) * ROWS
    seed = tl.load(seed_ptr)
    lanes = tl.arange(0, TILE)
    w = tl.zeros((TILE,), tl.int32)
    # Rows of probability 1 are those that reach a level. Where every row may be kept it is 1; else
    # it falls from round to round until no more rows reach it.
    level = tl.full((), 1, tl.int32)
    ratio = tl.zeros((), tl.float64)
    if HELD:
        w = weights(w_ptr, x_squares_ptr, lanes, M, TOTAL, PARTS, WGRAD, SAMPLED)
    if SAMPLED:
        some = tl.zeros((), tl.int32)
        total = tl.zeros((), tl.int64)
        for first in range(0, TOTAL, TILE):
            if not HELD:
                w = weights(w_ptr, x_squares_ptr, first + lanes, M, TOTAL, PARTS, WGRAD, SAMPLED)
            count, part = sums((w > 0).to(tl.int32), w.to(tl.int64))
            some += count
            total += part
        left = M
        more = some > M
        while more:
            level = tl.minimum((total + left - 1) // left, 0x7FFFFFFF).to(tl.int32)
            certain = tl.zeros((), tl.int32)
            total = tl.zeros((), tl.int64)
            for first in range(0, TOTAL, TILE):
                if not HELD:
                    w = weights(
                        w_ptr, x_squares_ptr, first + lanes, M, TOTAL, PARTS, WGRAD, SAMPLED
                    )
                reached = w >= level
                count, part = sums(reached.to(tl.int32), tl.where(reached, 0, w).to(tl.int64))
                certain += count
                total += part
            more = M - certain < left
            left = M - certain
        ratio = left.to(tl.float64) * 4294967296.0 / tl.maximum(total, 1).to(tl.float64)

    # A row is kept where the running sum of chances passes a multiple of 2^32, and how many that
    # has passed before is the row's number among the kept.
    word = first_word(seed)
    before = word
    high = word
    for first in range(0, tl.maximum(own, M if PARTS == 2 else 0), TILE):
        rows = first + lanes
        if not HELD:
            w = weights(w_ptr, x_squares_ptr, rows, M, TOTAL, PARTS, WGRAD, SAMPLED)
        chance = chances(w, level, ratio, LEAST, SAMPLED)
        mine, part = sums(tl.where(rows < own, chance, 0), tl.where(rows < M, chance, 0))
        before += mine
        high += part
    kept_high = (high >> 32).to(tl.int32) if PARTS == 2 else 0
    shift = segment_end(kept_high) - kept_high

    rows = own + tl.arange(0, ROWS)
    w_own = weights(w_ptr, x_squares_ptr, rows, M, TOTAL, PARTS, WGRAD, SAMPLED)
    chance = chances(w_own, level, ratio, LEAST, SAMPLED)
    ends = before + tl.cumsum(chance, 0)
    number = ((ends - chance) >> 32).to(tl.int32)
    kept = (ends >> 32).to(tl.int32) > number
    place = number + tl.where(rows < M, 0, shift)
    tl.store(rows_ptr + place, rows, mask=kept)
    divisor = tl.maximum(chance, LEAST).to(tl.float64)
    if WGRAD:
        bits = tl.reshape(random_u16(seed, 1, own, 1, ROWS, STREAM_SAMPLING), (ROWS,))
        times = 4294967296.0 / divisor + bits.to(tl.float64) * 1.52587890625e-05
        tl.store(repeat_ptr + place, times.to(tl.int8), mask=kept)
    else:
        factor = tl.where(rows < M, HIGH, 1) if PARTS == 2 else tl.full((ROWS,), 1, tl.int32)
        weight = factor.to(tl.float64) * 4294967296.0 / divisor
        tl.store(weight_ptr + place, weight.to(tl.float32), mask=kept)
        at = tl.where(rows < M, 2 * rows, 2 * (rows - M) + 1)
        tl.store(slots_ptr + at, tl.where(kept, place, -1), mask=rows < TOTAL)
        if PARTS == 1:
            tl.store(slots_ptr + at + 1, -1, mask=rows < TOTAL)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        end = ((before + tl.sum(chance, 0)) >> 32).to(tl.int32) + shift
        tl.store(counts_ptr, kept_high + shift)
        tl.store(counts_ptr + 1, segment_end(end))
        pad(rows_ptr, weight_ptr, repeat_ptr, kept_high, kept_high + shift, WGRAD)
        pad(rows_ptr, weight_ptr, repeat_ptr, end, ROOM, WGRAD)


@triton.jit
def draw_both_kernel(
    w_ptr,
    x_squares_ptr,
    seed_ptr,
    rows_ptr,
    counts_ptr,
    weight_ptr,
    slots_ptr,
    wgrad_rows_ptr,
    wgrad_counts_ptr,
    repeat_ptr,
    M,
    TOTAL,
    ROOM,
    WGRAD_ROOM,
    PARTS: tl.constexpr,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Draw each product's rows, with a seed each."""
    if tl.program_id(1) == 0:
        draw_kernel(
            w_ptr,
            x_squares_ptr,
            seed_ptr,
            rows_ptr,
            counts_ptr,
            weight_ptr,
            slots_ptr,
            repeat_ptr,
            M,
            TOTAL,
            ROOM,
            PARTS,
            False,
            SAMPLED,
            TILE,
            HELD,
            ROWS,
        )
    else:
        draw_kernel(
            w_ptr + TOTAL if SAMPLED else w_ptr,
            x_squares_ptr,
            seed_ptr + 1,
            wgrad_rows_ptr,
            wgrad_counts_ptr,
            weight_ptr,
            slots_ptr,
            repeat_ptr,
            M,
            TOTAL,
            WGRAD_ROOM,
            PARTS,
            True,
            SAMPLED,
            TILE,
            HELD,
            ROWS,
        )


class TritonSampleRows(TritonKernel):
    op = "sample_rows"
    Config = SampleRowsConfig
    choices: ClassVar = {
        "tile": (1024, 4096, 8192, 16384),
        "rows": (256, 512, 1024, 2048),
        "warps": (4, 8, 16, 32),
    }

    def legal(self, problem: Any, config: SampleRowsConfig, device: Device) -> str | None:
        expected, most = f"a power of two, 128 to {MOST_HELD}", MOST_HELD
        reason = (
            device_reason(device)
            or power_reason(config, "tile", "rows", expected=expected, least=128, most=most)
            or warps_reason(config, 32)
            or share_reason(max(config.tile, config.rows), config, 0, 64, "rows")
        )
        if reason is not None:
            return reason
        if problem.m > MOST_TOKENS:
            return f"m={problem.m}: expected at most {MOST_TOKENS}, for rows are numbered in int32"
        return None

    def default(self, problem: Any, device: Device) -> SampleRowsConfig:
        """Return a tile of all rows where registers allow it, and at most 64 programs."""
        total = problem.parts * problem.m
        tile, rows = (
            min(MOST_HELD, max(128, triton.next_power_of_2(ceil_div(total, parts))))
            for parts in (1, 64)
        )
        warps = 16 if total > tile else max(4, min(8, tile // 1024))
        return SampleRowsConfig(tile, min(tile, max(512, rows)), warps)

    def launches(
        self, problem: Any, config: SampleRowsConfig, device: Device
    ) -> tuple[Launch, ...]:
        total, sampled, products = problem.parts * problem.m, problem.sampled, problem.products
        given: dict[str, Any] = {"TOTAL": total, **EXACT}
        drawn = {
            "ROOM": problem.room(products[0]),
            "SAMPLED": sampled,
            "HELD": total <= config.tile,
        }
        if problem.product == "both":
            functions = weigh_both_kernel, draw_both_kernel
            drawn["WGRAD_ROOM"] = problem.room("wgrad")
        else:
            functions = weigh_kernel, draw_kernel
            given["WGRAD"] = problem.product == "wgrad"
        grid = ceil_div(total, config.rows), len(products)
        found = (
            Launch(functions[0], grid, problem, config, **given),
            Launch(functions[1], grid, problem, config, **given, **drawn),
        )
        return found if sampled else found[1:]

    def tensors(
        self, problem: Any, config: SampleRowsConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        w = squares = inputs["squares"]
        if problem.sampled:
            count = len(problem.products) * problem.parts * problem.m
            w = torch.empty(count, dtype=torch.int32, device=squares.device)
        return {**inputs, **outputs, "w": w}


KERNELS = (TritonSampleRows(),)
