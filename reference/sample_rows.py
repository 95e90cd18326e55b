"""Leverage-score sampling of a split gradient's rows, in Python's integers and IEEE doubles.

"Training Transformers with 4-bit Integers" (arXiv 2306.11987), section 4.2 and appendix: of the
parts·m rows c_i·g_i keep about m, row i with probability p_i proportional to its share in the
product's variance, and divide it by p_i. Probabilities above 1 become 1 and the others grow to
match ("water-filling"), which is the least variance that an expected count of m allows.

The draws are systematic: one u for all rows, so that row i is kept with probability p_i exactly,
and the number kept is Σp rounded down or up. A bounded buffer therefore cannot overflow, as that of
independent draws can; the variance is about theirs.

Every step is exact or one correctly rounded operation, so that kernels reproduce it to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from jetfire.reference.bit_split import HIGH
from jetfire.reference.philox import STREAM_SAMPLING, random_u16

ONE = 1 << 32  # the probability 1
# For wgrad 1/16, so that a row's repeat times a code fits INT8: 16·7 = 112.
LEAST = {"dgrad": 1, "wgrad": 1 << 28}
SEGMENT = 128  # the kept rows of each part are padded to a multiple of it


def factors(m: int, parts: int) -> list[int]:
    """Return what the codes of each of parts·m rows count: 14 in the high part, 1 in the low."""
    return [HIGH] * m + [1] * m if parts == 2 else [1] * m


def weights(scores: Sequence[int]) -> list[int]:
    """Return roots of the scores in units of their largest's 2^-30, rounded up: 0 for 0 alone."""
    roots = [math.sqrt(float(score)) for score in scores]
    unit = 2.0**30 / max(roots) if any(roots) else 0.0
    return [math.ceil(root * unit) for root in roots]


def probabilities(w: Sequence[int], budget: int, least: int = 1) -> list[int]:
    """Return probabilities in units of 2^-32 that are as w and sum to `budget` but for roundings.

    Args:
        w: at least 0; a row of 0 has no chance.
        budget: where no more rows than this have a weight, each has probability 1.
        least: the smallest probability of a row with a weight. What it adds comes on top of the
            budget.
    """
    if sum(value > 0 for value in w) <= budget:
        return [ONE if value > 0 else 0 for value in w]
    certain: set[int] = set()
    while True:
        left = budget - len(certain)
        total = sum(value for i, value in enumerate(w) if i not in certain)
        more = {i for i, value in enumerate(w) if i not in certain and value * left >= total}
        if not more:
            break
        certain |= more
    ratio = float(left) * 2.0**32 / float(total)
    found = [min(ONE, max(least, math.floor(float(value) * ratio))) if value else 0 for value in w]
    return [ONE if i in certain else value for i, value in enumerate(found)]


def systematic(chances: Sequence[int], u: int) -> list[bool]:
    """Return which rows are kept: those whose stretch of Σ chances + u has a multiple of 2^32.

    Args:
        chances: probabilities in units of 2^-32.
        u: in [0, 2^32); over all of them each row is kept as often as its probability says.
    """
    kept, before = [], u
    for chance in chances:
        kept.append((before + chance) >> 32 > before >> 32)
        before += chance
    return kept


def offset(seed: torch.Tensor) -> int:
    """Return the 32 bits that place all draws: the word at counter (0, 0, 0, STREAM_SAMPLING)."""
    low, high = random_u16(seed, 1, 2, STREAM_SAMPLING).flatten().tolist()
    return int(low | high << 16)


def repeats(chances: Sequence[int], seed: torch.Tensor) -> list[int]:
    """Return 1/p per row with a chance, rounded to an integer whose expectation is 1/p to 2^-16.

    Row i draws the 16 bits of element (1, i) of stream STREAM_SAMPLING.
    """
    bits = random_u16(seed, 1, len(chances), STREAM_SAMPLING, row0=1).flatten().tolist()
    return [
        math.floor(2.0**32 / float(chance) + bit / 65536) if chance else 0
        for chance, bit in zip(chances, bits, strict=True)
    ]


def places(kept: Sequence[bool], m: int) -> tuple[list[int], int, int]:
    """Return each row's place in the buffer (-1: not kept), the ends of the high part and of all.

    Kept rows are in order, each part's padded to a multiple of `SEGMENT`.
    """
    found, end, ends = [], 0, []
    for first in range(0, len(kept), m):
        for row in kept[first : first + m]:
            found.append(end if row else -1)
            end += row
        end = -(-end // SEGMENT) * SEGMENT
        ends.append(end)
    return found, ends[0] if len(ends) == 2 else 0, end


def chances_of(
    squares: torch.Tensor,
    parts: int,
    keep: str,
    x_squares: torch.Tensor | None = None,
) -> list[int]:
    """Return every row's probability in units of 2^-32; arguments as for `sample_rows`."""
    m = len(squares) // parts
    scores = [
        factor * factor * square
        for factor, square in zip(factors(m, parts), squares.tolist(), strict=True)
    ]
    if x_squares is not None:
        scores = [s * x for s, x in zip(scores, parts * x_squares.tolist(), strict=True)]
    least = LEAST["dgrad" if x_squares is None else "wgrad"]
    budget = len(scores) if keep == "all" else m
    return probabilities(weights(scores), budget, least)


def drawn(
    chances: Sequence[int], seed: torch.Tensor, parts: int, capacity: int, product: str
) -> dict[str, torch.Tensor]:
    """Draw rows with these probabilities in units of 2^-32, and return what `sample_rows` does."""
    m = len(chances) // parts
    place, high, end = places(systematic(chances, offset(seed)), m)
    if end > capacity:
        raise ValueError(f"{end} rows are kept: the buffer has {capacity}")
    rows, weight, repeat = [-1] * capacity, [0.0] * capacity, [0] * capacity
    times = repeats(chances, seed) if product == "wgrad" else [0] * len(chances)
    for i, (at, factor) in enumerate(zip(place, factors(m, parts), strict=True)):
        if at >= 0:
            rows[at], repeat[at] = i, times[i]
            weight[at] = factor * 2.0**32 / float(chances[i])

    def made(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")

    found = {"rows": made(rows, torch.int32), "counts": made([high, end], torch.int32)}
    if product == "wgrad":
        return {**found, "repeat": made(repeat, torch.int8)}
    slots = [place[:m], place[m:] if parts == 2 else [-1] * m]
    return {
        **found,
        "weight": made(weight, torch.float64).float(),
        "slots": made(slots, torch.int32).t().contiguous(),
    }


def sample_rows(
    squares: torch.Tensor,
    seed: torch.Tensor,
    parts: int,
    keep: str,
    capacity: int,
    x_squares: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return which rows of a split gradient a product keeps, and what each counts.

    Args:
        squares: int32, parts·m: Σ codes² of each row, the high part's m first.
        seed: int64, one element: the Philox key.
        parts: 2, or 1 where the gradient was not split.
        keep: "half": an expected m rows; "all": every row that is not zero.
        capacity: the length of the buffer of rows.
        x_squares: int32, m: the weight gradient's, Σ codes² of the other operand's rows. Without,
            it is the input gradient's.

    Returns:
        rows (capacity int32: a row's number, -1 for padding), counts (2 int32: the ends of the
        high part's segment and of all), and for the input gradient weight (capacity fp32: c/p) and
        slots (m×2 int32: where each part of a token is, or -1), for the weight gradient repeat
        (capacity int8: 1/p, rounded at random).
    """
    chances = chances_of(squares, parts, keep, x_squares)
    found = drawn(chances, seed, parts, capacity, "dgrad" if x_squares is None else "wgrad")
    return {name: tensor.to(squares.device) for name, tensor in found.items()}
