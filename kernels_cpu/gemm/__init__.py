"""The per-block INT8 GEMM on the CPU: the exact product of each block of K, scaled and added up."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised


def product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) in fp32, m×n: scaled integer products of each block of K, summed.

    In floats of 64 bits, which autocast leaves as they are; their sums need no int32 between.
    """
    m, n = a.shape[0], b.shape[0]
    c = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    a_scale = a_scale.repeat_interleave(block, 0)[:m]
    b_scale = b_scale.repeat_interleave(block, 0)[:n]
    for i in range(a_scale.shape[1]):
        part = slice(i * block, (i + 1) * block)
        inner = (a[:, part].double() @ b[:, part].double().t()).float()
        c += inner.mul_(a_scale[:, i, None] * b_scale[:, i])
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
