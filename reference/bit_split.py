"""Bit splitting of a gradient into two 4-bit parts (arXiv 2306.11987, section 4.2).

Codes, unit and squares are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.nibbles import pack
from jetfire.reference.philox import random_u16
from jetfire.reference.quantize import TINY

HIGH = 14  # units that a code of the high part stands for
LARGEST = 7  # the codes' magnitude
MOST = {8: LARGEST * HIGH, 4: LARGEST}  # max|x| in units, by the bits kept


def unit_of(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unit, max|x| over 98 (bits=8) or 7 (bits=4), correctly rounded: fp32 (1,).

    It is 0 where max|x| < 2^-100, and NaN where x holds NaN or ±Inf.
    """
    amax = x.float().abs().amax().reshape(1)
    # A tensor, not a number: torch turns division by a number into a product.
    unit = amax / torch.full_like(amax, MOST[bits])
    return unit.masked_fill(amax < TINY, 0.0).masked_fill(~torch.isfinite(amax), math.nan)


def split(v: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split v into codes hi and lo in [-7, 7], integers in fp32: ``v ≈ 14·hi + lo``.

    ``hi = rint(v·c)``, c = 1/14 in fp32, the product exact and ties to even; ``lo = floor(v − 14·hi
    + u)``, the sum rounded to fp32 as 128 more than it.

    Args:
        v: elements in units, fp32 in [-98, 98] or up to two units in the last place beyond.
        draws: u·2^16, integers in [0, 65536).
    """
    factor = torch.tensor(1 / HIGH, dtype=torch.float32, device="cpu").double()
    high = (v.double() * factor).round().float()
    low = v + (128.0 + draws.float() * 2.0**-16 - HIGH * high)
    return high, low.floor() - 128.0


def codes(
    x: torch.Tensor,
    unit: torch.Tensor,
    bits: int = 8,
    seed: torch.Tensor | None = None,
    row0: int = 0,
) -> torch.Tensor:
    """Return int8 codes of x over the unit: hi (m×n) above lo (m×n), or one part (m×n) for bits=4.

    ``v = x·(1/unit)``, each operation rounded in fp32, then `split`; for bits=4 ``rint(v)``.

    Args:
        x: m×n, any float dtype: rows row0 … row0 + m of what is split.
        unit: as `unit_of` gives it. Where it is 0 or NaN codes are 0, but for NaN that of the first
            element is 1: so a row is kept, and what is made of it is NaN too.
        seed: int64, one element, for bits=8.
    """
    v = x.float() * unit.reciprocal() if bool(unit > 0) else torch.zeros_like(x).float()
    return parts_of(v, unit, bits, seed, row0)


def parts_of(
    v: torch.Tensor,
    unit: torch.Tensor,
    bits: int,
    seed: torch.Tensor | None = None,
    row0: int = 0,
) -> torch.Tensor:
    """Return int8 codes as `codes` does, of elements in units."""
    if bits == 4:
        parts = [v.round()]
    elif seed is None:
        raise ValueError("splitting in two needs a seed")
    else:
        parts = list(split(v, random_u16(seed, len(v), v.shape[1], row0=row0)))
    if row0 == 0 and bool(torch.isnan(unit)):
        parts[0][0, 0] = 1.0
    return torch.cat(parts).to(torch.int8)


def bit_split(
    x: torch.Tensor, bits: int = 8, seed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split x ≈ unit·(14·hi + lo), lo rounded stochastically, or round x ≈ unit·q to nearest.

    Args:
        x: m×n, n even, any float dtype.
        bits: 8 for two parts of 4, 4 for one.
        seed: int64, one element, for bits=8.

    Returns:
        Packed codes (int8, 2m×n/2: hi's rows, then lo's; m×n/2 for bits=4), the unit (fp32, (1,))
        and Σ codes² of each row (int32).
    """
    unit = unit_of(x, bits)
    q = codes(x, unit, bits, seed)
    return pack(q), unit, q.int().square().sum(dim=1, dtype=torch.int32)
