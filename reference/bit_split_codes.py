"""Bit splitting of a gradient in INT8 codes: as that of floats, but for the unit and one product.

Codes, unit and squares are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.bit_split import MOST, parts_of
from jetfire.reference.nibbles import pack
from jetfire.reference.quantize import TINY, spread

MOST_CODE = 127
FIXED = 2.0**31  # column sums are integers in units of this part of the unit


def unit_of(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unit, the largest scale over 98/127 (bits=8) or 7/127 (bits=4): fp32 (1,).

    So no code stands for more than 98 units, or 7, and it takes no pass over the codes to know. It
    is 0 where the largest scale is below 2^-100, and NaN where a scale is NaN or ∞.
    """
    largest = scale.amax().reshape(1)
    # A tensor, not a number: torch turns division by a number into a product.
    unit = largest / torch.full_like(largest, MOST[bits] / MOST_CODE)
    return unit.masked_fill(largest < TINY, 0.0).masked_fill(~torch.isfinite(largest), math.nan)


def bit_split_codes(
    q: torch.Tensor,
    scale: torch.Tensor,
    block: int,
    bits: int = 8,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split q·scale ≈ unit·(14·hi + lo), lo rounded stochastically, or round it to unit·q' nearest.

    An element in units is ``v = q·(scale·(1/unit))``, each operation rounded in fp32.

    Args:
        q, scale: codes of m×n in blocks of `block`, n even.
        bits: 8 for two parts of 4, 4 for one.
        seed: int64, one element, for bits=8.

    Returns:
        Packed codes, the unit and squares, as `jetfire.reference.bit_split.bit_split`.
    """
    unit = unit_of(scale, bits)
    usable = bool(unit > 0)
    ratio = scale * unit.reciprocal() if usable else torch.zeros_like(scale)
    v = q.float() * spread(ratio, block, *q.shape)
    codes = parts_of(v, unit, bits, seed)
    return pack(codes), unit, codes.int().square().sum(dim=1, dtype=torch.int32)


def column_sums(
    q: torch.Tensor, scale: torch.Tensor, unit: torch.Tensor, block: int
) -> torch.Tensor:
    """Return the sums of q·scale over each column, fp32 (n,), which no order of adding changes.

    With the ratio of a scale to the unit as the integer ``rint(scale·(1/unit)·2^31)`` a sum is one
    of products of integers, exact, of which ``(sum·2^-31)·unit`` is made in fp64 and rounded once.

    Args:
        unit: as `unit_of` gives it; where it is NaN all sums are.
    """
    m, n = q.shape
    usable = bool(unit > 0)
    ratio = scale * unit.reciprocal() if usable else torch.zeros_like(scale)
    fixed = (ratio.double() * FIXED).round().long()
    padded = torch.nn.functional.pad(q, (0, 0, 0, -m % block))
    of_blocks = padded.view(-1, block, n).sum(dim=1, dtype=torch.int64)
    total = (of_blocks * fixed.repeat_interleave(block, 1)[:, :n]).sum(dim=0)
    return (total.double() / FIXED * unit.double()).float()
