"""Softmax cross-entropy's gradient as per-block INT8 on the CPU, through the gradient in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, logits_gradient, quantised


class TorchQuantizeDlogits(TorchKernel):
    op = "quantize_dlogits"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        return quantised(logits_gradient(inputs, problem.columns), problem, inputs)


KERNELS = (TorchQuantizeDlogits(),)
