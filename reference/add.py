"""The residual addition (Jetfire, arXiv 2403.12422, section 5.3): a BF16 stream plus INT8 branches.

Sums are exact to the bit: one fp32 product, one fp32 sum, one rounding to the stream's dtype.
"""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize


def add(x: torch.Tensor, y: torch.Tensor, y_scale: torch.Tensor, block: int) -> torch.Tensor:
    """Return x + y·y_scale in fp32, rounded to x's dtype.

    Forward, x is the residual stream and y a branch's output; backward, x is the stream's gradient
    and y the gradient that the stream's quantised copy received.

    Args:
        x: m×n, bf16.
        y, y_scale: int8 m×n and fp32 ⌈m/block⌉×⌈n/block⌉.

    Returns:
        m×n of x's dtype.
    """
    return (x.float() + dequantize(y, y_scale, block)).to(x.dtype)
