"""What evaluation in fp32 may add to a result, and where it may overflow: parts of ops' bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROUNDING = 2.0**-24  # of one fp32 operation, relatively
# A few of them: what evaluation may add to a result, in units of its largest term.
NOISE = 8 * ROUNDING
OVER = 2.0**127  # beyond this a sum or a product in fp32 may overflow on its way


def worst(terms: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest of every block of an m×n tensor, 0 where that is NaN or Inf."""
    from jetfire.reference.quantize import block_amax

    return block_amax(terms, block).nan_to_num(0.0, 0.0, 0.0)


def overflows(terms: torch.Tensor, block: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return which blocks have a term (m×n) that may overflow, or lie in such rows (bool, m)."""
    from jetfire.reference.quantize import block_amax

    large = terms >= OVER
    return block_amax((large if rows is None else large | rows[:, None]).float(), block) > 0
