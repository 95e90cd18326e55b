"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over whole rows, in the dtype it is given.

`ops` calls these with float64, where the results are exact for fp32's purposes.
"""

from __future__ import annotations

import torch


def statistics(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1/√(mean of squares + eps) of every row: m×n → [m]."""
    return (x.square().mean(dim=1) + eps).rsqrt()


def forward(x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x·rstd·weight; x m×n, rstd [m], weight [n]."""
    return x * rstd[:, None] * weight


def backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dsum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of `forward` through rstd as well.

    With x̂ = x·rstd and g = dy·weight: ``dx = rstd·(g − x̂·mean(g·x̂))``, the mean over whole rows,
    and ``dweight = Σ_rows dy·x̂``.

    Args:
        x, dy: m×n.
        weight: [n].
        rstd: [m], of x.
        dsum: m×n, what x received besides (a residual stream's gradient); dx is the sum of both.

    Returns:
        dx m×n, dweight [n].
    """
    xhat = x * rstd[:, None]
    g = dy * weight
    along = (g * xhat).mean(dim=1, keepdim=True)
    dx = (g - xhat * along) * rstd[:, None]
    return dx if dsum is None else dsum + dx, (dy * xhat).sum(dim=0)
