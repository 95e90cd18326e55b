"""Dropout of a quantised tensor on the CPU, forward and backward alike."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.dropout import dropout


class TorchDropout(TorchKernel):
    op = "dropout"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        return with_transpose(*dropout(inputs["q"], inputs["scale"], problem.p, inputs["seed"]))


KERNELS = (TorchDropout(),)
