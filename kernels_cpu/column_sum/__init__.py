"""Column sums of a quantised tensor on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel


class TorchColumnSum(TorchKernel):
    op = "column_sum"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return exact integer sums within each block, then fp32 across them."""
        n, block = problem.n, problem.block
        codes = torch.nn.functional.pad(inputs["qt"], (0, -problem.m % block))
        sums = codes.view(n, -1, block).sum(dim=2, dtype=torch.int32).float()
        return {"sums": (sums * inputs["scale_t"].repeat_interleave(block, 0)[:n]).sum(dim=1)}


KERNELS = (TorchColumnSum(),)
