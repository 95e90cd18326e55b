"""Codes and scales back to floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, FloatName, Problem
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, dtype_of, quantized
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_dequantize"]


@dataclass(frozen=True)
class DequantizeProblem(Problem):
    """(q, scale) of an m×n tensor to x (m×n, `out`)."""

    block: Block = 32
    out: FloatName = "bf16"


class Dequantize(StandardOp):
    name = "dequantize"
    summary = "per-block INT8 to float"
    Problem = DequantizeProblem
    same_bits_over = "kernels"

    def reads(self, problem: DequantizeProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block)

    def writes(self, problem: DequantizeProblem) -> Specs:
        return {"x": Spec(problem.out, (problem.m, problem.n))}

    def reference(self, problem: DequantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.dequantize import dequantize

        dtype = dtype_of(problem.out)
        return {"x": dequantize(inputs["q"], inputs["scale"], problem.block, dtype)}

    def eager(self, problem: DequantizeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same product in torch: BF16 training has no such pass to compare with."""
        import torch

        q, scale, dtype = inputs["q"], inputs["scale"], dtype_of(problem.out)
        rows = torch.arange(problem.m, device=q.device) // problem.block
        columns = torch.arange(problem.n, device=q.device) // problem.block
        return lambda: (q.float() * scale[rows[:, None], columns[None, :]]).to(dtype)


OP = Dequantize()

_dequantize = Operator("dequantize(Tensor q, Tensor scale, int block, str out) -> Tensor")


@checked
def int8_dequantize(x: Quantized, *, out: FloatName = "bf16") -> Tensor:
    """Return codes times scales as `out`, m×n."""
    q, scale = expect.quantized("x", x)
    expect.choice("out", out, FloatName)
    return _dequantize(q, scale, x.block, out)
