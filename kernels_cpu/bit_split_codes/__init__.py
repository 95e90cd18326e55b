"""Bit splitting of codes on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.bit_split_codes import bit_split_codes


class TorchBitSplitCodes(TorchKernel):
    op = "bit_split_codes"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        codes = inputs["q"], inputs["scale"], problem.block
        parts, unit, squares = bit_split_codes(*codes, problem.bits, inputs.get("seed"))
        return {"parts": parts, "unit": unit, "squares": squares}


KERNELS = (TorchBitSplitCodes(),)
