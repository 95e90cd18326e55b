"""The residual addition and its gradient on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.add import add
from jetfire.reference.layernorm import statistics


class TorchAdd(TorchKernel):
    op = "add"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if problem.mode == "bwd":
            dx = add(inputs["dsum"], inputs["dq"], inputs["dq_scale"], problem.block)
            return {"dx": dx, **quantised(dx, problem, inputs)}
        total = add(inputs["x"], inputs["y"], inputs["y_scale"], problem.block)
        mean, rstd = statistics(total.float(), problem.eps)
        return {"sum": total, **quantised(total, problem, inputs), "mean": mean, "rstd": rstd}


KERNELS = (TorchAdd(),)
