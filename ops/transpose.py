"""The quantised transpose: codes and scales of xᵀ from those of x, exact for square blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Problem
from jetfire.core.tensors import Quantized, Specs, Tensors, quantized
from jetfire.measure.op import StandardOp

__all__ = ["int8_transpose"]


@dataclass(frozen=True)
class TransposeProblem(Problem):
    """(q, scale) of an m×n tensor to (qt, scale_t), n×m."""

    block: Block = 32


class Transpose(StandardOp):
    name = "transpose"
    summary = "transpose of per-block INT8 codes and scales"
    Problem = TransposeProblem
    same_bits_over = "kernels"

    def reads(self, problem: TransposeProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block)

    def writes(self, problem: TransposeProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout="qt")

    def reference(self, problem: TransposeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.transpose import transpose

        return dict(zip(("qt", "scale_t"), transpose(inputs["q"], inputs["scale"]), strict=True))

    def eager(self, problem: TransposeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 transpose that feeds a BF16 GEMM."""
        import torch

        x = inputs["q"].to(torch.bfloat16)
        return lambda: x.t().contiguous()


OP = Transpose()

_transpose = Operator("transpose(Tensor q, Tensor scale, int block) -> (Tensor, Tensor)")


@checked
def int8_transpose(x: Quantized) -> Quantized:
    """Return xᵀ (n×m) with contiguous codes of its own; nothing is requantised."""
    return Quantized.of(_transpose(*expect.quantized("x", x), x.block), "q", x.block)
