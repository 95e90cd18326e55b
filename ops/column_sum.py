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
from jetfire.measure.bounds import OVER
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    import torch
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
        widths = dict.fromkeys(out for out, _ in model.linears())
        return [{"m": model.tokens, "n": width} for width in widths]

    def reads(self, problem: ColumnSumProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout="qt")

    def writes(self, problem: ColumnSumProblem) -> Specs:
        return {"sums": Spec("fp32", (problem.n,))}

    def reference(self, problem: ColumnSumProblem, inputs: Tensors) -> Tensors:
        """Return the sums in float64, and a bound on what summing in fp32 may add."""
        from jetfire.reference.column_sum import column_sum

        bound, over = _bound(problem, inputs["qt"], inputs["scale_t"])
        sums = column_sum(inputs["qt"], inputs["scale_t"], problem.block)
        return {"sums": sums, "sums_bound": bound, "sums_over": over}

    def eager(self, problem: ColumnSumProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 gradient's rows summed to fp32: what BF16 training does for a bias."""
        import torch

        from jetfire.reference.dequantize import dequantize

        wide = dequantize(inputs["qt"], inputs["scale_t"], problem.block, torch.bfloat16)
        gradient = wide.t().contiguous()
        return lambda: gradient.sum(dim=0, dtype=torch.float32)


def _bound(
    problem: ColumnSumProblem, qt: torch.Tensor, scale_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return γ_b·Σ|s_b·S_b| over a column's b blocks, S_b the exact sum of a block's codes.

    And where Σ|s_b·S_b| is so large that a part of the sum may overflow.

    b products and b − 1 additions, in any order, are off by at most γ_b = b·u / (1 − b·u) of the
    terms' magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2);
    u = 2^-24.
    """
    import torch

    block, blocks = problem.block, ceil_div(problem.m, problem.block)
    codes = torch.nn.functional.pad(qt, (0, -problem.m % block)).view(problem.n, blocks, block)
    terms = codes.sum(dim=2).double() * scale_t.double().repeat_interleave(block, 0)[: problem.n]
    rounding = blocks * 2.0**-24
    size = terms.abs().sum(dim=1).nan_to_num(0.0)
    return rounding / (1 - rounding) * size, size >= OVER


OP = ColumnSum()


_column_sum = Operator(
    "column_sum(Tensor qt, Tensor scale_t, int block) -> Tensor",
    derive=lambda qt: {"m": qt[1], "n": qt[0]},
)


@checked
def int8_column_sum(x: Quantized) -> Tensor:
    """Return the column sums (fp32, n) of x (m×n) from its transpose: a bias's gradient."""
    if x.qt is None:
        raise UsageError("x has no transpose: expected codes of layout=qt or both")
    return _column_sum(*expect.quantized("qt", x.t), x.block)
