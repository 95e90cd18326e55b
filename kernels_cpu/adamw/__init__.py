"""AdamW, and the new weight's codes, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import InPlaceKernel, rate_and_step
from jetfire.reference.adamw import rounded
from jetfire.reference.quantize import quantize

_STATE = ("param", "exp_avg", "exp_avg_sq")
# Numbers per thread that are updated at once, so that they stay in a core's cache from the first
# operation to the last.
_PART = 2**16


class TorchAdamw(InPlaceKernel):
    op = "adamw"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if not (problem.guarded and bool(inputs["found_inf"] != 0)):
            _update(problem, inputs)
        new = {name: inputs[name] for name in _STATE}
        if not problem.quantises:
            return new
        return {**new, **with_transpose(*quantize(new["param"], problem.block))}


def _update(problem: Any, inputs: Tensors) -> None:
    """Make the step in place, of some rows after others."""
    beta1, beta2 = rounded(problem.beta1), rounded(problem.beta2)
    rate, step = rate_and_step(inputs)
    rows = max(1, _PART * torch.get_num_threads() // problem.n)
    parts = (inputs[name].split(rows) for name in (*_STATE, "grad"))
    for p, m, v, g in zip(*parts, strict=True):
        if problem.guarded:
            g = g / inputs["grad_scale"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = v.sqrt().mul_((1 - beta2**step) ** -0.5).add_(problem.eps)
        p.mul_(1 - rate * problem.decay)
        p.addcdiv_(m, denominator, value=-rate / (1 - beta1**step))


KERNELS = (TorchAdamw(),)
