"""Per-block quantisation on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised


class TorchQuantize(TorchKernel):
    op = "quantize"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        return quantised(inputs["x"], problem, inputs)


KERNELS = (TorchQuantize(),)
