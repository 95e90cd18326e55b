"""Softsign and its gradient on the CPU, in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.dequantize import dequantize


class TorchSoftsign(TorchKernel):
    op = "softsign"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        x = dequantize(inputs["x"], inputs["x_scale"], problem.block)
        below = 1 + x.abs()
        if problem.mode == "fwd":
            return quantised(x / below, problem, inputs)
        dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block)
        return quantised(dy / below / below, problem, inputs)


KERNELS = (TorchSoftsign(),)
