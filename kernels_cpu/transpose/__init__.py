"""The quantised transpose on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import TorchKernel


class TorchTranspose(TorchKernel):
    op = "transpose"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        return with_transpose(inputs["q"], inputs["scale"])


KERNELS = (TorchTranspose(),)
