"""The INT8 product of a matrix with fallback (Zhang et al., arXiv 2503.08040).

``C = (A + R)·Bᵀ``: R, what the codes of A miss, is 0 but in the blocks that fall back. That is the
plain product of [A | R] and [B | B], along K one after the other.
"""

from __future__ import annotations

import torch

from jetfire.reference.quantize import pad


def side_by_side(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    r: torch.Tensor,
    r_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes and scales of [A | R], m×2K, and of [B | B], n×2K; K is k in whole blocks.

    Args:
        a, r: int8 m×k; a_scale, r_scale: fp32 ⌈m/block⌉×⌈k/block⌉.
        b: int8 n×k; b_scale: fp32 ⌈n/block⌉×⌈k/block⌉.
    """
    k = a_scale.shape[1] * block
    a, r, b = (pad(codes, block)[: len(codes), :k] for codes in (a, r, b))
    left = torch.cat([a, r], dim=1), torch.cat([a_scale, r_scale], dim=1)
    return *left, torch.cat([b, b], dim=1), torch.cat([b_scale, b_scale], dim=1)
