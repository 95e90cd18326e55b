"""Rotary position embeddings (Su et al., arXiv 2104.09864, section 3.2)."""

from __future__ import annotations

import torch


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Turn each pair (i, i + head/2) of every head of a row by the row's angle for that pair.

    In fp32, in which each product and each sum is rounded once, then to the dtype of x.

    Args:
        x: m×n, heads beside one another.
        cos, sin: fp32, m×head/2.
        inverse: whether to turn back, which is also the gradient.
    """
    first, second = x.float().unflatten(1, (-1, 2, cos.shape[1])).unbind(2)
    c, s = cos[:, None], sin[:, None]
    s = -s if inverse else s
    turned = torch.stack([first * c - second * s, second * c + first * s], dim=2)
    return turned.flatten(1).to(x.dtype)
