"""GELU (Hendrycks and Gimpel, arXiv 1606.08415) and its derivative, both forms, in float64.

erf: ``x·Φ(x)``, Φ the normal distribution function. tanh, GPT-2's: ``x·σ(2u)`` with
``u = √(2/π)·(x + 0.044715·x³)`` and σ the logistic function, since ``(1 + tanh u)/2 = σ(2u)``.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.dequantize import dequantize

CUBIC = 0.044715
TWICE_ROOT = 2.0 * math.sqrt(2.0 / math.pi)


def gate(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Return what multiplies x, a float64 tensor: Φ(x) or σ(2u)."""
    if approximate == "tanh":
        return torch.sigmoid(TWICE_ROOT * (x + CUBIC * x**3))
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def rise(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Return x times the gate's derivative at x, a float64 tensor."""
    if approximate == "tanh":
        # (1 − σ(z))·z' vanishes for large z, where z' alone would overflow.
        left = torch.sigmoid(-TWICE_ROOT * (x + CUBIC * x**3))
        return gate(x) * left * TWICE_ROOT * (x + 3.0 * CUBIC * x**3)
    return x * torch.exp(-0.5 * x.square()) / math.sqrt(2.0 * math.pi)


def gelu(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Return GELU of a float64 tensor, elementwise."""
    return x * gate(x, approximate)


def gelu_grad(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Return GELU's derivative at a float64 tensor, elementwise."""
    return gate(x, approximate) + rise(x, approximate)


def slope_terms(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Return the sum of the magnitudes of the derivative's two terms."""
    return gate(x, approximate) + rise(x, approximate).abs()


def forward(
    x: torch.Tensor, x_scale: torch.Tensor, block: int, approximate: str = "tanh"
) -> torch.Tensor:
    """Return GELU of codes and scales: float64 m×n, before it is quantised.

    Args:
        x: int8 m×n; x_scale: fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    return gelu(dequantize(x, x_scale, block, torch.float64), approximate)


def backward(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    block: int,
    approximate: str = "tanh",
) -> torch.Tensor:
    """Return dx = dy·gelu'(x) of codes and scales: float64 m×n, before it is quantised.

    Args:
        x, dy: int8 m×n; x_scale, dy_scale: fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    slope = gelu_grad(dequantize(x, x_scale, block, torch.float64), approximate)
    return dequantize(dy, dy_scale, block, torch.float64) * slope
