"""What the checks of gradients are made of (`Op.gradients`): autograd, and codes as values."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.contract import Gradient, Tensors

HALF = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 2.0**-22}  # a rounding, generously
FP32 = 1e-5  # of the largest term of a short sum
LEAST = 2.0**-24  # fp16's smallest number, and what blocks below 2^-100 lose


def of(y: torch.Tensor, upstream: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of some leaves, by autograd."""
    return list(torch.autograd.grad(y, leaves, upstream))


def values(q: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Codes times their scales, in float64."""
    return q.double() * _spread(scale, block, q)


def _spread(scale: torch.Tensor, block: int, like: torch.Tensor) -> torch.Tensor:
    m, n = like.shape
    wide = scale.double().repeat_interleave(block, 0)[:m]
    return wide.repeat_interleave(block, 1)[:, :n]


def quantised(problem: Any, outputs: Tensors, exact: torch.Tensor, noise: Any) -> list[Gradient]:
    """The codes that there are, within a step of the exact values, or half of one."""
    step = 1.0 if problem.rounding == "stochastic" else 0.5
    found = []
    for name, scale, turned in (("q", "scale", False), ("qt", "scale_t", True)):
        if name in outputs:
            q, s = outputs[name], outputs[scale]
            got, wide = values(q, s, problem.block), _spread(s, problem.block, q)
            if turned:
                got, wide = got.t(), wide.t()
            found.append(Gradient(name, got, exact, wide * (step + 0.01) + noise + 2.0**-100))
    return found
