"""The quantised transpose: codes and scales of xᵀ from those of x, exact for square blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import Block, Check, Op, Problem, SameBits, Tensors, quantised_outputs
from jetfire.core.operators import Operator
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_transpose"]


@dataclass(frozen=True)
class TransposeProblem(Problem):
    """(q, scale) of an m×n tensor to (qt, scale_t), n×m."""

    block: Block = 32


class Transpose(Op):
    name = "transpose"
    summary = "transpose of per-block INT8 codes and scales"
    Problem = TransposeProblem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = (model.width, 3 * model.width, model.hidden)
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: TransposeProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        q, scale = source.quantised(problem.m, problem.n, problem.block)
        return {"q": q, "scale": scale}

    def outputs(self, problem: TransposeProblem, inputs: Tensors) -> Tensors:
        return quantised_outputs(problem, inputs["q"].device, "qt", problem.m, problem.n)

    def reference(self, problem: TransposeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.transpose import transpose

        qt, scale_t = transpose(inputs["q"], inputs["scale"])
        return {"qt": qt, "scale_t": scale_t}

    def check(
        self,
        problem: TransposeProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.every(
            [check.exact(name, out, expected[name]) for name, out in outputs.items()]
        )

    def same_bits(self, problem: TransposeProblem) -> SameBits:
        return "kernels"

    def peers(
        self, problem: TransposeProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The BF16 transpose that feeds a BF16 GEMM."""
        import torch

        from jetfire.measure import peers

        x = inputs["q"].to(torch.bfloat16)

        def eager() -> torch.Tensor:
            return x.t().contiguous()

        return peers.elementwise(eager, self.bytes(problem), x.device)


OP = Transpose()

_transpose = Operator(
    "transpose(Tensor q, Tensor scale, int block) -> (Tensor, Tensor)",
)


@checked
def int8_transpose(q: Tensor, scale: Tensor, *, block: Block = 32) -> tuple[Tensor, Tensor]:
    """qt (int8 n×m) and scale_t, contiguous; nothing is requantised."""
    expect.codes("q", q, scale, block)
    return _transpose(q, scale, block)
