"""Parts of gradient checks (`Op.gradients`): autograd, and codes as values."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.op import Gradient
from jetfire.core.problem import written_block
from jetfire.core.tensors import Tensors, names_of
from jetfire.reference.quantize import spread

HALF = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 2.0**-22}  # more than one rounding's error
FP32 = 1e-5  # the error of a short sum, relative to its largest term
LEAST = 2.0**-24  # fp16's smallest number; more than blocks below 2^-100 lose


def of(y: torch.Tensor, upstream: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of some leaves, by autograd."""
    return list(torch.autograd.grad(y, leaves, upstream))


def values(q: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Return codes times their scales, in float64."""
    return q.double() * spread(scale.double(), block, *q.shape)


def quantised(
    problem: Any, outputs: Tensors, exact: torch.Tensor, noise: Any, name: str = "q"
) -> list[Gradient]:
    """Return a name's codes, beside the exact values: they may differ by a step, or by half."""
    step = 1.0 if getattr(problem, "rounding", "nearest") == "stochastic" else 0.5
    block = written_block(problem)
    q, scale, qt, scale_t = names_of(name).values()
    found = []
    for own, own_scale in ((q, scale), (qt, scale_t)):
        if own in outputs:
            codes, s = outputs[own], outputs[own_scale]
            got, wide = values(codes, s, block), spread(s.double(), block, *codes.shape)
            if own == qt:
                got, wide = got.t(), wide.t()
            found.append(Gradient(own, got, exact, wide * (step + 0.01) + noise + 2.0**-100))
    return found
