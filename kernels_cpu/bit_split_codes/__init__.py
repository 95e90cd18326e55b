"""Bit splitting of codes on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.bit_split_codes import bit_split_codes, column_sums


class TorchBitSplitCodes(TorchKernel):
    op = "bit_split_codes"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        q, scale, block = inputs["q"], inputs["scale"], problem.block
        parts, unit, squares = bit_split_codes(q, scale, block, problem.bits, inputs.get("seed"))
        found = {"parts": parts, "unit": unit, "squares": squares}
        return found | ({"sums": column_sums(q, scale, unit, block)} if problem.sums else {})


KERNELS = (TorchBitSplitCodes(),)
