"""The rows of a split gradient that a product keeps, their room, and how many 32-bit sums take.

"Training Transformers with 4-bit Integers" (arXiv 2306.11987), section 4.2: leverage-score sampling
of the rows of both parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from jetfire.core.tensors import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

Parts = Literal[2, 1]
Product = Literal["dgrad", "wgrad", "both"]
Keep = Literal["half", "all"]
Value = TypeVar("Value")

# The largest K whose integer sums fit in 32 bits: products of two wide codes, or in a wgrad of 14,
# of a code of 7 repeated 16 times and of another code.
MOST_K: Mapping[str, int] = {
    "fwd": (2**31 - 1) // 128**2,
    "dgrad": (2**31 - 1) // 128**2,
    "wgrad": (2**31 - 1) // (14 * 112 * 8),
}
SEGMENT = 128  # rows: the kept ones of each part are padded to a multiple of it


class SampledRows(NamedTuple):
    """The rows of a gradient that a product keeps. There is room for more: the rest of it is −1.

    Attributes:
        rows: int32, those to gather: each part's up to a multiple of 128, −1 elsewhere.
        counts: int32 (2,), the ends of the first part's rows and of all.
        weight: fp32, what each of the rows is multiplied by. For the weight's gradient None.
        slots: int32 m×2, where a row's two parts are in rows. For the weight's gradient None.
        repeat: int8, how often each of the rows counts. For the input's gradient None.
    """

    rows: Tensor
    counts: Tensor
    weight: Tensor | None
    slots: Tensor | None
    repeat: Tensor | None


def capacity(m: int, parts: int, product: str, keep: str) -> int:
    """Return how many rows hold whatever is kept, each part's padded to a multiple of `SEGMENT`.

    Systematic draws keep ⌈Σp⌉ rows at most. Σp is m but for what raising the smallest
    probabilities adds: less than one row for dgrad, a sixteenth of 2m for wgrad.
    """
    whole = parts * ceil_div(m, SEGMENT) * SEGMENT
    if keep == "all" or parts == 1:  # no more than m rows
        return whole
    most = m + 1 + (m // 8 if product == "wgrad" else 0)
    # Two segments end where 2·(SEGMENT − 1) are padding at the most.
    return min(whole, (most + 2 * (SEGMENT - 1)) // SEGMENT * SEGMENT)


def named(*draws: Mapping[str, Value]) -> dict[str, Value]:
    """Return a draw's outputs, or dgrad's with wgrad's: `wgrad_` is put before shared names."""
    first, *second = draws
    found = dict(first)
    for draw in second:
        found |= {f"wgrad_{name}" if name in first else name: x for name, x in draw.items()}
    return found
