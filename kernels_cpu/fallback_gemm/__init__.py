"""The INT8 GEMM with fallback on the CPU: the product of each plane of codes, added up."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, product


class IntMmFallback(TorchKernel):
    op = "fallback_gemm"
    name = "int_mm"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        a, a_scale, r, r_scale, b, b_scale = (
            inputs[name] for name in ("a", "a_scale", "r", "r_scale", "b", "b_scale")
        )
        c = product(a, a_scale, b, b_scale, problem.block)
        c += product(r, r_scale, b, b_scale, problem.block)
        c = c + inputs["bias"] if problem.bias else c
        return {"c": c.t() if problem.transpose else c}


KERNELS = (IntMmFallback(),)
