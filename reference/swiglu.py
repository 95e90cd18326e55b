"""SwiGLU's elementwise part (Shazeer, arXiv 2002.05202), ``silu(gate)·up``, and its gradients.

``silu(z) = z·σ(z)``, σ the logistic function (Elfwing, Uchibe and Doya, arXiv 1702.03118). All of
it is in float64.
"""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize


def silu(z: torch.Tensor) -> torch.Tensor:
    """Return z·σ(z) of a float64 tensor, elementwise."""
    return z * torch.sigmoid(z)


def rise(z: torch.Tensor) -> torch.Tensor:
    """Return z·σ'(z) at a float64 tensor, which silu's derivative adds to σ."""
    return z * torch.sigmoid(z) * torch.sigmoid(-z)


def silu_grad(z: torch.Tensor) -> torch.Tensor:
    """Return silu's derivative at a float64 tensor, elementwise."""
    return torch.sigmoid(z) + rise(z)


def slope_terms(z: torch.Tensor) -> torch.Tensor:
    """Return the sum of the magnitudes of the derivative's two terms."""
    return torch.sigmoid(z) + rise(z).abs()


def forward(
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """Return silu(gate)·up of codes and scales: float64 m×n, before it is quantised.

    Args:
        gate, up: int8 m×n; gate_scale, up_scale: fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    z = dequantize(gate, gate_scale, block, torch.float64)
    return silu(z) * dequantize(up, up_scale, block, torch.float64)


def backward(
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    dy: torch.Tensor,
    dy_scale: torch.Tensor,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dgate = dy·up·silu'(gate) and dup = dy·silu(gate): float64 m×n, not yet quantised.

    Args:
        gate, up, dy: int8 m×n; gate_scale, up_scale, dy_scale: fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    z = dequantize(gate, gate_scale, block, torch.float64)
    wide = dequantize(dy, dy_scale, block, torch.float64)
    return wide * dequantize(up, up_scale, block, torch.float64) * silu_grad(z), wide * silu(z)
