"""Column sums of a quantised gradient: what a linear layer's bias receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Problem
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, ceil_div, quantized
from jetfire.measure.bounds import higham, of_sum
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_column_sum"]


@dataclass(frozen=True)
class ColumnSumProblem(Problem):
    """(qt, scale_t), the transposed copy of a quantised m×n gradient, to its n column sums."""

    block: Block = 32


class ColumnSum(StandardOp):
    name = "column_sum"
    summary = "column sums of a per-block INT8 gradient: the gradient of a bias"
    Problem = ColumnSumProblem
    same_bits_over = "runs"
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"m": ("sums",)}

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.outputs()

    def reads(self, problem: ColumnSumProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout="qt")

    def writes(self, problem: ColumnSumProblem) -> Specs:
        return {"sums": Spec("fp32", (problem.n,))}

    def reference(self, problem: ColumnSumProblem, inputs: Tensors) -> Tensors:
        """Return the sums in float64, and a bound on what summing in fp32 may add.

        A column's b blocks are b products and b − 1 additions, in any order, of each block's scale
        and the exact sum of its codes.
        """
        import torch

        from jetfire.reference.column_sum import column_sum

        qt, scale_t, block = inputs["qt"], inputs["scale_t"], problem.block
        blocks = ceil_div(problem.m, block)
        codes = torch.nn.functional.pad(qt, (0, -problem.m % block)).view(problem.n, blocks, block)
        scales = scale_t.double().repeat_interleave(block, 0)[: problem.n]
        size = (codes.sum(dim=2).double() * scales).abs().sum(dim=1)
        return of_sum("sums", column_sum(qt, scale_t, block), size, higham(blocks))

    def eager(self, problem: ColumnSumProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 gradient's rows summed to fp32: what BF16 training does for a bias."""
        import torch

        from jetfire.reference.dequantize import dequantize

        wide = dequantize(inputs["qt"], inputs["scale_t"], problem.block, torch.bfloat16)
        gradient = wide.t().contiguous()
        return lambda: gradient.sum(dim=0, dtype=torch.float32)


OP = ColumnSum()


_column_sum = Operator(
    "column_sum(Tensor qt, Tensor scale_t, int block) -> Tensor",
    derive=lambda qt: {"m": qt[1], "n": qt[0]},
)


@checked
def int8_column_sum(x: Quantized) -> Tensor:
    """Return the column sums (fp32, n) of x (m×n) from its transpose: a bias's gradient."""
    if x.qt is None or x.scale_t is None:
        raise UsageError("x lacks qt or scale_t: expected both (layout=qt or both)")
    return _column_sum(*expect.quantized("x.t", x.t), x.block)
