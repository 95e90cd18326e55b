"""RMSNorm and its gradient on the CPU: the reference's formulas in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.dequantize import dequantize
from jetfire.reference.rmsnorm import backward, forward, statistics


class TorchRmsNorm(TorchKernel):
    op = "rmsnorm"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        x = dequantize(inputs["x"], inputs["x_scale"], problem.block)
        if problem.mode == "bwd":
            dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block)
            dsum = inputs["dsum"].float() if problem.residual else None
            dx, dweight = backward(x, dy, inputs["weight"], inputs["rstd"], dsum)
            dx = dx.bfloat16() if problem.residual else dx
            return {"dx": dx, **quantised(dx, problem, inputs), "dweight": dweight}
        rstd = statistics(x, problem.eps)
        y = forward(x, rstd, inputs["weight"])
        return {**quantised(y, problem, inputs), "rstd": rstd}


KERNELS = (TorchRmsNorm(),)
