"""Floats from codes and scales on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, dtype_of
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.dequantize import dequantize


class TorchDequantize(TorchKernel):
    op = "dequantize"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        dtype = dtype_of(problem.out)
        return {"x": dequantize(inputs["q"], inputs["scale"], problem.block, dtype)}


KERNELS = (TorchDequantize(),)
