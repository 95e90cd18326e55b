"""Sizes that a block may have, and those of the head's backward and of moments, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from jetfire.core.errors import UsageError
from jetfire.core.moments import GROUP, scales
from jetfire.core.problem import Block
from jetfire.core.tensors import ceil_div

# The head's backward in INT8 takes about so many logits at once, whose codes are 0.5 GB, but no
# fewer rows: to add to the weight's gradient, part by part, moves 8 bytes per element. For parts of
# 4096 rows that is, by an H200's rates, up to a quarter of the product's time; for 8192 an eighth.
LOGITS, ROWS = 2**28, 8192
# Rows of a part where no logits stand whole. By the rates above, what is added moves as long as
# half of that product takes, which is a third of the head's.
ROWS_IN_PARTS = 2048
# Numbers of a moment in codes at least, as in Dettmers et al. (arXiv 2110.02861): fewer need not be
# small.
LEAST_MOMENT = 4096


def head_parts(rows: int, vocabulary: int, whole: bool = True) -> tuple[int, int]:
    """Return in how many parts that backward takes the rows, and the rows of each but the last.

    Parts begin where blocks of any side do.

    Args:
        whole: whether logits stand whole.
    """
    parts = max(1, min(ceil_div(rows * vocabulary, LOGITS), rows // ROWS))
    if not whole:
        parts = max(1, rows // ROWS_IN_PARTS)
    side = max(get_args(Block))
    size = max(1, ceil_div(rows, parts * side)) * side
    return max(1, ceil_div(rows, size)), size


def moment_scales(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the shape of the scales of a moment of this shape in 8 bits; None if it is in fp32."""
    row = math.prod(shape[1:])
    if len(shape) < 2 or row < GROUP or shape[0] * row < LEAST_MOMENT:
        return None
    return scales(shape[0], row)


def check_llama(
    width: int, heads: int, kv_heads: int, hidden: int, block: int = 1, flow: int = 1
) -> None:
    """Check the sizes of a block of Llama's, multiplied in blocks of `block`, 1 in BF16.

    Layers that read the same input stand under one another in one product, so each has whole
    blocks; the MLP's also of what flows between products.

    Raises:
        UsageError: a size is not a multiple of what it must be.
    """
    if heads < 1 or width % heads or width // heads % 2:
        raise UsageError(f"width={width}: expected heads={heads} times an even number")
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")
    of_kv = width // heads * kv_heads
    sides = {"width": (width, block), "keys": (of_kv, block), "hidden": (hidden, max(block, flow))}
    for name, (size, side) in sides.items():
        if size < 1 or size % side:
            raise UsageError(f"{name} of {size}: expected a multiple of {side}")
