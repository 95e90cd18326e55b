"""The Hadamard quantiser of codes on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.hadamard_quantize_codes import quantize_codes
from jetfire.reference.nibbles import pack, widen


class TorchHadamardQuantizeCodes(TorchKernel):
    op = "hadamard_quantize_codes"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        given = inputs["q"], inputs["scale"], inputs["step"], problem.block, problem.group
        codes, unit, squares = quantize_codes(*given)
        found = {"unit": unit, "squares": squares}
        if problem.layout != "packed":
            found["wide"] = widen(codes)
        if problem.layout != "wide":
            found["packed"] = pack(codes)
        return found


KERNELS = (TorchHadamardQuantizeCodes(),)
