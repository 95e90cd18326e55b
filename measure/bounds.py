"""What evaluation in fp32 may add to a result, and where it may overflow: parts of ops' bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from jetfire.core.tensors import Tensors

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


def statistics_bounds(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float
) -> Tensors:
    """Return what computing rows' mean and rstd in fp32 may add, and where it may overflow.

    A chain of at most n/512 + 32 additions has as many roundings of the row's mean |x|; the mean's
    error is in every difference from it, beside x's own rounding, and so in the variance, which
    matters where that is small beside the mean's square.

    Args:
        x: float64 m×n; mean, rstd: float64 m, its statistics.
    """
    import torch

    size, variance = x.abs(), (x - mean[:, None]).square().mean(dim=1)
    chain = (x.shape[1] / 512 + 32) * ROUNDING
    of_mean = chain * size.mean(dim=1) + 2.0**-149
    each = ROUNDING * (size.square().mean(dim=1).sqrt() + variance.sqrt()) + of_mean
    of_variance = (2 * variance.sqrt() + each) * each + 2.0**-149
    total = variance + eps
    low = (total - of_variance).clamp(min=0).rsqrt()
    over = (size + mean.abs()[:, None]).square().sum(dim=1) >= OVER
    of_rstd = (low - rstd * (1 - chain - 4 * ROUNDING)).nan_to_num(0.0)
    return {
        "mean_bound": of_mean.nan_to_num(0.0),
        "mean_over": size.sum(dim=1) >= OVER,
        "rstd_bound": of_rstd.masked_fill(over, torch.inf),
        "rstd_over": torch.isinf(low) | over,
        "row_over": over,
    }
