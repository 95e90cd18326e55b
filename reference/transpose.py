"""The transpose of codes and scales (Jetfire, arXiv 2403.12422, section 4.1)."""

from __future__ import annotations

import torch


def transpose(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quantised transpose, which is exact because blocks are square.

    Args:
        q: int8, m×n.
        scale: fp32, ⌈m/block⌉×⌈n/block⌉.

    Returns:
        int8 n×m and fp32 ⌈n/block⌉×⌈m/block⌉, contiguous.
    """
    return q.t().contiguous(), scale.t().contiguous()
