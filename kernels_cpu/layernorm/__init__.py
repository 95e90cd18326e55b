"""LayerNorm and its gradient on the CPU: the reference's formulas in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.dequantize import dequantize
from jetfire.reference.layernorm import backward, forward, statistics


class TorchLayerNorm(TorchKernel):
    op = "layernorm"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        x = dequantize(inputs["x"], inputs["x_scale"], problem.block)
        if problem.mode == "bwd":
            dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block)
            weight, mean, rstd = (inputs[name] for name in ("weight", "mean", "rstd"))
            dsum = inputs["dsum"].float() if problem.residual else None
            dx, dweight, dbias = backward(x, dy, weight, mean, rstd, dsum)
            dx = dx.bfloat16() if problem.residual else dx
            codes = quantised(dx, problem, inputs)
            return {"dx": dx, **codes, "dweight": dweight, "dbias": dbias}
        if problem.stats == "given":
            mean, rstd = inputs["mean"], inputs["rstd"]
        else:
            mean, rstd = statistics(x, problem.eps)
        y = forward(x, mean, rstd, inputs["weight"], inputs["bias"])
        return {**quantised(y, problem, inputs), "mean": mean, "rstd": rstd}


KERNELS = (TorchLayerNorm(),)
