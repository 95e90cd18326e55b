"""Parts of ops' error bounds: the error of evaluation in fp32, and where it may overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetfire.core.tensors import blocks_of, dtype_of

if TYPE_CHECKING:
    import torch

    from jetfire.core.problem import FloatName
    from jetfire.core.tensors import Tensors

ROUNDING = 2.0**-24  # the relative error of one fp32 operation
# A few roundings: what evaluation may add to a result, in units of its largest term.
NOISE = 8 * ROUNDING
OVER = 2.0**127  # beyond this the evaluation of a sum or a product in fp32 may overflow


def worst(terms: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest value of every block of an m×n tensor, 0 where that is NaN or Inf."""
    from jetfire.reference.quantize import block_amax

    return block_amax(terms, block).nan_to_num(0.0, 0.0, 0.0)


def reblocked(bounds: torch.Tensor, m: int, n: int, block: int, out_block: int) -> torch.Tensor:
    """Return bounds on all elements of an m×n tensor's blocks for its blocks of another side.

    Args:
        bounds: at least 0, or bool, ⌈m/block⌉×⌈n/block⌉. Of blocks within one the largest holds.
    """
    from jetfire.reference.quantize import block_amax, spread

    if out_block > block:
        return block_amax(bounds.double(), out_block // block).to(bounds.dtype)
    return spread(bounds, block // out_block, *blocks_of(m, n, out_block))


def overflows(terms: torch.Tensor, block: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return which blocks have a term (m×n) that may overflow, or lie in given rows (bool, m)."""
    from jetfire.reference.quantize import block_amax

    large = terms >= OVER
    return block_amax((large if rows is None else large | rows[:, None]).float(), block) > 0


def of_sum(
    name: str, total: torch.Tensor, size: torch.Tensor, relative: float, lost: float = 0.0
) -> Tensors:
    """Return what is expected of a sum in fp32: within a bound, but where it may overflow.

    Args:
        total: the sum in float64.
        size: that of its terms' magnitudes: beyond `OVER` a part of the sum may overflow.
        relative: how much of that size roundings may add.
        lost: what terms too small for fp32 may add.
    """
    bound = relative * size.nan_to_num(0.0) + lost
    return {name: total, f"{name}_bound": bound, f"{name}_over": size >= OVER}


def of_float(
    name: str,
    value: torch.Tensor,
    dtype: FloatName,
    noise: torch.Tensor,
    over: torch.Tensor | None = None,
) -> Tensors:
    """Return what is expected of a float: within its evaluation's noise and two roundings' error.

    Args:
        value: in float64.
        noise: what evaluation in fp32 may add to it; numbers below 2^-126 may be lost besides.
        over: where evaluation may overflow.
    """
    import torch

    kind = torch.finfo(dtype_of(dtype))
    least = max(kind.smallest_normal * kind.eps, 2.0**-126)
    bound = kind.eps * value.abs() + noise + least
    found = {name: value, f"{name}_bound": bound.nan_to_num(0.0, 0.0)}
    return found if over is None else {**found, f"{name}_over": over}


def bf16_unit(size: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring bf16 numbers at a size (float64, at least 0)."""
    import torch

    least = torch.finfo(torch.bfloat16).smallest_normal
    exponent = size.clamp(min=least).frexp().exponent
    return torch.ldexp(torch.ones_like(size), exponent - 8)


def higham(roundings: int) -> float:
    """Return γ_k = k·u/(1 − k·u): what k roundings in a row add to a sum, of its terms' magnitudes.

    Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2; u = 2^-24.
    """
    return roundings * ROUNDING / (1 - roundings * ROUNDING)


def statistics_bounds(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float
) -> Tensors:
    """Return bounds on the error of rows' mean and rstd in fp32, and where they may overflow.

    A chain of at most n/512 + 32 additions has as many roundings of the row's mean |x|. The mean's
    error, beside x's own rounding, is in every difference from it and so in the variance. That
    matters where the variance is small beside the mean's square.

    Args:
        x: float64 m×n.
        mean, rstd: float64 m, the statistics of x.
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
