"""The per-block INT8 GEMM on the CPU: the exact product of each block of K, scaled and added up."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, integers, quantised
from jetfire.reference.quantize import spread


def product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) in fp32, m×n: scaled int32 products of each block of K, summed."""
    m, k = a.shape
    n = b.shape[0]
    c = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    for i in range(a_scale.shape[1]):
        part = slice(i * block, min(k, (i + 1) * block))
        inner = integers(a[:, part], b[:, part]).float()
        rows = spread(a_scale[:, i, None], block, m, 1)
        cols = spread(b_scale[:, i, None], block, n, 1)
        c += inner.mul_(rows * cols.t())
    return c


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
        return {"c": c + inputs["c"] if problem.accumulate else c}


KERNELS = (IntMm(),)
