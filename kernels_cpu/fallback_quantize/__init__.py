"""Per-block quantisation with fallback on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.fallback_quantize import fallback_quantize


class TorchFallbackQuantize(TorchKernel):
    op = "fallback_quantize"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        q, scale, r, r_scale = fallback_quantize(inputs["x"], problem.block, inputs["threshold"])
        return with_transpose(q, scale) | with_transpose(r, r_scale, "r")


KERNELS = (TorchFallbackQuantize(),)
