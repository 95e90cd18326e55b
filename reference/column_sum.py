"""Column sums of a quantised gradient: what a linear layer's bias receives."""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize


def column_sum(qt: torch.Tensor, scale_t: torch.Tensor, block: int) -> torch.Tensor:
    """Return Σ over the m rows of code·scale for each of the n columns, in float64.

    Args:
        qt: int8, n×m, the transposed codes.
        scale_t: fp32, ⌈n/block⌉×⌈m/block⌉.

    Returns:
        float64, n; NaN for a column that runs through a block whose scale is NaN.
    """
    return dequantize(qt, scale_t, block, torch.float64).sum(dim=1)
