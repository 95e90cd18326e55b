"""Dropout of a quantised tensor on the CPU, forward and backward alike."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.dropout import dropout


class TorchDropout(TorchKernel):
    op = "dropout"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        q, scale, seed = (inputs[name] for name in ("q", "scale", "seed"))
        blocks = problem.block, problem.out_block
        return with_transpose(*dropout(q, scale, problem.p, seed, *blocks))


KERNELS = (TorchDropout(),)
