"""The per-block INT8 GEMM on the CPU: the exact product of each block of K, scaled and added up."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, product, quantised
from jetfire.reference.gemm import sums_of_squares


class IntMm(TorchKernel):
    op = "gemm"
    name = "int_mm"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        a, a_scale, b, b_scale = (inputs[name] for name in ("a", "a_scale", "b", "b_scale"))
        c = product(a, a_scale, b, b_scale, problem.block)
        if problem.bias:
            c += inputs["bias"]
        if problem.out == "int8":
            return quantised(c, problem, inputs)
        if problem.squares:
            return {"c": c, "squares": sums_of_squares(c).float()}
        return {"c": c + inputs["c"] if problem.accumulate else c}


KERNELS = (IntMm(),)
