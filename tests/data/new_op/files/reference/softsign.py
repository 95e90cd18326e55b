"""Softsign, x/(1 + |x|), and its derivative, 1/(1 + |x|)², in float64."""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize


def forward(x: torch.Tensor, x_scale: torch.Tensor, block: int) -> torch.Tensor:
    """Softsign of codes and scales: float64 m×n, before it is quantised.

    Args:
        x: int8 m×n; x_scale: fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    wide = dequantize(x, x_scale, block, torch.float64)
    return wide / (1 + wide.abs())


def backward(
    x: torch.Tensor, x_scale: torch.Tensor, dy: torch.Tensor, dy_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """dx = dy/(1 + |x|)² of codes and scales: float64 m×n, before it is quantised."""
    below = 1 + dequantize(x, x_scale, block, torch.float64).abs()
    return dequantize(dy, dy_scale, block, torch.float64) / below.square()
