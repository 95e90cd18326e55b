"""GELU and its gradient on the CPU: the reference's formulas in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.dequantize import dequantize
from jetfire.reference.gelu import gelu, gelu_grad

# The derivative is 0 or 1 long before; beyond 1e12 its cubic overflows fp32 and gives 0·∞.
FLAT = 1e3


class TorchGelu(TorchKernel):
    op = "gelu"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        x = dequantize(inputs["x"], inputs["x_scale"], problem.block)
        if problem.mode == "fwd":
            return quantised(gelu(x, problem.approximate), problem, inputs)
        dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block)
        dx = dy * gelu_grad(x.clamp(-FLAT, FLAT), problem.approximate)
        return quantised(dx, problem, inputs)


KERNELS = (TorchGelu(),)
