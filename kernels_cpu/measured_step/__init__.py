"""A measured step on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.measured_step import LEAST, OF_RMS, rows_read


class TorchMeasuredStep(TorchKernel):
    op = "measured_step"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return it of squares summed in float64: of codes exact sums in each block of a row."""
        read = rows_read(problem.m)
        some, count = inputs["x"][read], problem.n * len(range(problem.m)[read])
        if "x_scale" not in inputs:
            norm = torch.linalg.vector_norm(some, dtype=torch.float64)
        else:
            block = problem.block
            wide = torch.nn.functional.pad(some, (0, -problem.n % block)).unflatten(1, (-1, block))
            squares = wide.int().square().sum(dim=2)
            rows = torch.arange(problem.m, device=some.device)[read] // block
            norm = (squares * inputs["x_scale"][rows].double().square()).sum().sqrt()
        step = norm * (OF_RMS / count**0.5)
        return {"step": step.clamp(min=LEAST).float().view(1)}


KERNELS = (TorchMeasuredStep(),)
