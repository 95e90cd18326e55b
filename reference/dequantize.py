"""Floats from codes and scales."""

from __future__ import annotations

import torch

from jetfire.reference.quantize import spread


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return q·scale, the product rounded in fp32 (exact in float64), then to dtype.

    Args:
        q: int8, m×n.
        scale: fp32, ⌈m/block⌉×⌈n/block⌉.

    Returns:
        m×n of dtype; NaN throughout a block whose scale is NaN.
    """
    m, n = q.shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (q.to(wide) * spread(scale, block, m, n).to(wide)).to(dtype)
