"""Bit splitting on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.bit_split import bit_split


class TorchBitSplit(TorchKernel):
    op = "bit_split"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        q, unit, squares = bit_split(inputs["x"], problem.bits, inputs.get("seed"))
        return {"q": q, "unit": unit, "squares": squares}


KERNELS = (TorchBitSplit(),)
