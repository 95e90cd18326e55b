"""AdamW, and the new weight's codes, on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import NoConfig, TorchKernel
from jetfire.reference.adamw import rounded
from jetfire.reference.quantize import quantize

_STATE = ("param", "exp_avg", "exp_avg_sq")


class TorchAdamw(TorchKernel):
    op = "adamw"

    def launch(self, problem: Any, config: NoConfig, inputs: Tensors, outputs: Tensors) -> None:
        """Step in place: `outputs` hold the parameter and its moments before it and after it."""
        before = {**inputs, **outputs}
        super().launch(problem, config, before, outputs)

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        new = {name: inputs[name] for name in _STATE}
        if not (problem.guarded and bool(inputs["found_inf"] != 0)):
            new = _updated(problem, inputs)
        if not problem.quantises:
            return new
        return {**new, **with_transpose(*quantize(new["param"], problem.block))}


def _updated(problem: Any, inputs: Tensors) -> Tensors:
    """Return the parameter and its moments after the step, fp32.

    Raises:
        UsageError: the step is below 1. A step on a GPU is not read here, and gives NaN.
    """
    beta1, beta2 = rounded(problem.beta1), rounded(problem.beta2)
    p, m, v = (inputs[name] for name in _STATE)
    g, rate, step = inputs["grad"], float(inputs["rate"]), float(inputs["step"])
    if not step >= 1:
        raise UsageError(f"step={step:g}: expected at least 1, for it counts this step too")
    if problem.guarded:
        g = g / inputs["grad_scale"]
    m = (m * beta1).add_(g, alpha=1 - beta1)
    v = (v * beta2).addcmul_(g, g, value=1 - beta2)
    denominator = v.sqrt().mul_((1 - beta2**step) ** -0.5).add_(problem.eps)
    p = p * (1 - rate * problem.decay)
    p = p.addcdiv_(m, denominator, value=-rate / (1 - beta1**step))
    return dict(zip(_STATE, (p, m, v), strict=True))


KERNELS = (TorchAdamw(),)
