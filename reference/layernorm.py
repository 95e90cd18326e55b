"""LayerNorm (Ba, Kiros and Hinton, arXiv 1607.06450) over whole rows, in the dtype it is given.

Jetfire (arXiv 2403.12422, section 5.2) feeds it dequantised INT8 tensors. `ops` calls these with
float64, where the results are exact for fp32's purposes.
"""

from __future__ import annotations

import torch


def statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and 1/√(variance + eps) of every row: m×n → [m], [m]; the variance is biased."""
    mean = x.mean(dim=1)
    variance = (x - mean[:, None]).square().mean(dim=1)
    return mean, (variance + eps).rsqrt()


def forward(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Return (x − mean)·rstd·weight + bias; x m×n, mean and rstd [m], weight and bias [n]."""
    return (x - mean[:, None]) * rstd[:, None] * weight + bias


def backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dsum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of `forward` through the statistics as well.

    With x̂ = (x − mean)·rstd and g = dy·weight: ``dx = rstd·(g − mean(g) − x̂·mean(g·x̂))``, means
    over whole rows; ``dweight = Σ_rows dy·x̂`` and ``dbias = Σ_rows dy``.

    Args:
        x, dy: m×n.
        weight: [n].
        mean, rstd: [m], of x.
        dsum: m×n, what x received besides (a residual stream's gradient); dx is the sum of both.

    Returns:
        dx m×n, dweight [n], dbias [n].
    """
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dy * weight
    first = g.mean(dim=1, keepdim=True)
    second = (g * xhat).mean(dim=1, keepdim=True)
    dx = (g - first - xhat * second) * rstd[:, None]
    dx = dx if dsum is None else dsum + dx
    return dx, (dy * xhat).sum(dim=0), dy.sum(dim=0)
