"""AdamW with INT8 moments, and the new weight's codes, on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import InPlaceKernel, rate_and_step
from jetfire.reference.adamw import rounded
from jetfire.reference.adamw8 import (
    first_codes,
    first_values,
    moments,
    narrowed,
    second_codes,
    second_values,
)
from jetfire.reference.quantize import quantize

_STATE = ("param", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


class TorchAdamw8(InPlaceKernel):
    op = "adamw8"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        new = {name: inputs[name] for name in _STATE}
        if not (problem.guarded and bool(inputs["found_inf"] != 0)):
            new = _updated(problem, inputs)
        if not problem.quantises:
            return new
        return {**new, **with_transpose(*quantize(new["param"], problem.block))}


def _updated(problem: Any, inputs: Tensors) -> Tensors:
    """Return the parameter, and codes and scales of its moments, after the step."""
    rate, step = rate_and_step(inputs)
    m, v = moments(
        first_values(inputs["exp_avg"], inputs["exp_avg_scale"]),
        second_values(inputs["exp_avg_sq"], inputs["exp_avg_sq_scale"]),
        inputs["grad"].float(),
        problem.beta1,
        problem.beta2,
        inputs.get("grad_scale"),
    )
    beta1, beta2 = rounded(problem.beta1), rounded(problem.beta2)
    denominator = v.sqrt().mul_((1 - beta2**step) ** -0.5).add_(problem.eps)
    p = inputs["param"].float() * (1 - rate * problem.decay)
    p = p.addcdiv_(m, denominator, value=-rate / (1 - beta1**step))
    if problem.dtype == "bf16":
        p = narrowed(p, inputs["seed"])
    return dict(zip(_STATE, (p, *first_codes(m), *second_codes(v)), strict=True))


KERNELS = (TorchAdamw8(),)
