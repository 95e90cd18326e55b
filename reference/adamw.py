"""AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) with a device's scalars, in float64.

The order is that of torch's fused update: decay first, and scalars of the host rounded to fp32.
State is kept in fp32, so what lies beyond its range is infinite; where the second moment is, the
parameter does not move.
"""

from __future__ import annotations

import math

import torch

LARGEST = torch.finfo(torch.float32).max


def rounded(number: float) -> float:
    """Round a host's number to the nearest fp32, as kernels get it."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _kept(x: torch.Tensor) -> torch.Tensor:
    """Replace by infinity what is beyond fp32."""
    return torch.where(x.abs() > LARGEST, math.inf * x.sign(), x)


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rate: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the parameter and both moments after a step, float64.

    Args:
        param, grad, exp_avg, exp_avg_sq: of one shape.
        rate, step: one element each; `step` counts this one too, so it is at least 1.
        grad_scale: what the gradient is divided by.
        found_inf: nothing changes where it is not 0.
    """
    p, g, m, v = (t.double() for t in (param, grad, exp_avg, exp_avg_sq))
    if found_inf is not None and float(found_inf) != 0:
        return p, m, v
    beta1, beta2, eps, decay = map(rounded, (beta1, beta2, eps, decay))
    lr, t = float(rate), float(step)
    if grad_scale is not None:
        g = _kept(g / float(grad_scale))
    m = beta1 * m + (1 - beta1) * g
    v = _kept(beta2 * v + (1 - beta2) * g.square())
    denominator = (v / (1 - beta2**t)).sqrt() + eps
    p = p * (1 - lr * decay) - lr / (1 - beta1**t) * m / denominator
    return p, m, v
