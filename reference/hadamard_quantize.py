"""The Hadamard quantiser: transform, 4-bit codes of a given step; and its gradients.

Section 3 of arXiv 2306.11987; LSQ is Esser et al., "Learned step size quantization" (arXiv
1902.08153). Codes, scale and the gradient of x are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.hadamard import butterflies, factor

LEAST, MOST = -8, 7


def multiplier(step: torch.Tensor, group: int) -> torch.Tensor:
    """Return (1/√group)/step in fp32, (1,), by which butterflies are multiplied for codes.

    It is 0 where that is not finite and positive, as where the step is not.
    """
    # A tensor, not a number: torch turns division by a number into a product.
    inverse = torch.full_like(step, factor(group)) / step
    return inverse.masked_fill(~(torch.isfinite(inverse) & (inverse > 0)), 0.0)


def rounded(v: torch.Tensor) -> torch.Tensor:
    """Return clamp(rint(v), −8, 7), ties to even, as floats; NaN gives −8, as fmax has it."""
    low, high = (torch.full_like(v, x) for x in (LEAST, MOST))
    return torch.fmin(torch.fmax(v, low), high).round()


def inside(q: torch.Tensor) -> torch.Tensor:
    """Return where the gradient passes: −8 < q < 7. A code of either end counts as clipped.

    A nibble does not tell whether it was clipped; the outermost half step was not, but counts too.
    """
    return (q > LEAST) & (q < MOST)


def quantize(
    x: torch.Tensor, step: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise the transformed x: ``clamp(rint(b·((1/√group)/step)), −8, 7)``, b its butterflies.

    Every operation rounds once, in fp32.

    Args:
        x: m×n, any float dtype; group divides n.
        step: fp32 (1,).

    Returns:
        q, int8 m×n, one code per byte; scale, fp32 (1,): the step; squares, int32 m: Σ q² per row.
        The scale is NaN where a group's sum is not finite, as it is not where x holds NaN or ±Inf,
        and where the multiplier is 0.
    """
    b, inverse = butterflies(x.float(), group), multiplier(step, group)
    q = rounded(b * inverse).to(torch.int8)
    bad = ~torch.isfinite(b[:, ::group]).all() | (inverse == 0)
    squares = q.int().square().sum(dim=1, dtype=torch.int32)
    return q, step.masked_fill(bad, math.nan), squares


def gathered(dx_hat: torch.Tensor, slots: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the codes from its kept rows: fp32 m×n.

    Args:
        dx_hat: rows×n, any float dtype.
        slots: m×2 int32: the rows of dx_hat that sum to a row's, −1 where there is none.
        unit: fp32 (1,): a row that was not kept is 0·unit, NaN where the gradient was not finite.
    """
    missing = 0.0 * unit
    high, low = (
        torch.where(slot[:, None] >= 0, dx_hat[slot.clamp(min=0).long()].float(), missing)
        for slot in slots.unbind(1)
    )
    return high + low


def input_gradient(dx_hat: torch.Tensor, q: torch.Tensor, group: int) -> torch.Tensor:
    """Return (dX̂ ∘ I)·blockdiag(H/√group): fp32 m×n, I as `inside` has it.

    Args:
        dx_hat: m×n, any float dtype, of the quantised and transformed x.
        q: int8 m×n, one code per byte.
    """
    return butterflies(dx_hat.float().masked_fill(~inside(q), 0.0), group) * factor(group)


def step_terms(
    dx_hat: torch.Tensor, x: torch.Tensor, step: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of x, and each element's part of the step's gradient: dX̂·δ, float64 m×n.

    δ = q − v where the gradient passes, else q, v in fp32 what q was rounded from (equation 3 of
    arXiv 1902.08153). LSQ's own factor 1/√(7·numel) is left to the caller.
    """
    v = butterflies(x.float(), group) * multiplier(step, group)
    q = rounded(v)
    delta = torch.where(inside(q), q.double() - v.double(), q.double())
    return q.to(torch.int8), dx_hat.double() * delta
