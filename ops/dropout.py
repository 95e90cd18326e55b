"""Dropout of a quantised tensor, forward and backward; the mask is redrawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Gradient, Model
from jetfire.core.operators import Operator
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Problem
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, quantized, with_transpose
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_dropout", "int8_dropout_backward"]


@dataclass(frozen=True)
class DropoutProblem(Problem):
    """(q, scale) of an m×n tensor, dropped with probability `p`, in the given layout.

    Backward is the same map on the gradient: one seed gives both the same mask. Where `out_block`
    is another than `block`, what is kept is quantised anew, to nearest; else it keeps its codes.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    p: float = 0.1
    layout: Layout = "q"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p < 1:
            raise UsageError(f"p={self.p}: expected a probability in [0, 1)")


class Dropout(StandardOp):
    name = "dropout"
    summary = "dropout of per-block INT8, exact: zeroes codes and rescales blocks"
    Problem = DropoutProblem
    same_bits_over = "kernels"
    # With a tile tuned for one layout, both in blocks of 32 took 5% longer than with the default.
    matched = (*StandardOp.matched, "layout")
    modes = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def reads(self, problem: DropoutProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block) | {"seed": Spec("int64", (1,))}

    def writes(self, problem: DropoutProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.out_block, layout=problem.layout)

    def reference(self, problem: DropoutProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.dropout import dropout

        q, scale, seed = (inputs[name] for name in ("q", "scale", "seed"))
        blocks = problem.block, problem.out_block
        return with_transpose(*dropout(q, scale, problem.p, seed, *blocks))

    def gradients(
        self, problem: DropoutProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """Return dx through the mask that dropping ones shows, scaled by the threshold of p."""
        import torch

        from jetfire.measure import gradient
        from jetfire.reference.dropout import drop_threshold, dropout

        dy = gradient.values(inputs["q"], inputs["scale"], problem.block)
        ones = torch.ones_like(inputs["q"])
        kept = dropout(ones, inputs["scale"], problem.p, inputs["seed"])[0].double()
        x = torch.zeros_like(dy, requires_grad=True)
        (dx,) = gradient.of(x * kept / (1 - drop_threshold(problem.p) / 65536), dy, x)
        allowed = gradient.FP32 * dx.abs() + 2.0**-140
        if problem.out_block != problem.block:
            return gradient.quantised(problem, outputs, dx, allowed)
        found = []
        for q, scale in (("q", "scale"), ("qt", "scale_t")):
            if q in outputs:
                got = gradient.values(outputs[q], outputs[scale], problem.block)
                found.append(Gradient(q, got if q == "q" else got.t(), dx, allowed))
        return found

    def eager(self, problem: DropoutProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's dropout of BF16; backward its gradient, from the mask that it stored."""
        import torch

        x, p = inputs["q"].to(torch.bfloat16), problem.p
        if problem.mode == "fwd":
            return lambda: torch.nn.functional.dropout(x, p)
        mask = torch.rand(x.shape, dtype=torch.float32, device=x.device) >= p
        return lambda: torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p))


OP = Dropout()

_dropout = Operator(
    "dropout(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout, int?"
    " out_block=None) -> Tensor[]",
)
_dropout_backward = Operator(
    "dropout_backward(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout, int?"
    " out_block=None) -> Tensor[]",
)


@checked
def int8_dropout(
    x: Quantized,
    seed: Tensor,
    *,
    p: float = 0.1,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> Quantized:
    """Return x with codes zeroed with probability p and scales divided by 1 − p.

    Args:
        out_block: the block of the result's codes. Where it is another than x's what is kept is
            quantised anew, to nearest; else, and where it is None, it keeps its codes.
    """
    return _dropped(_dropout, x, seed, p, layout, out_block)


@checked
def int8_dropout_backward(
    x: Quantized,
    seed: Tensor,
    *,
    p: float = 0.1,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> Quantized:
    """Return the gradient of `int8_dropout` with the same seed, from its output's gradient."""
    return _dropped(_dropout_backward, x, seed, p, layout, out_block)


def _dropped(
    drop: Operator,
    x: Quantized,
    seed: Tensor,
    p: float,
    layout: Layout,
    out_block: Block | None,
) -> Quantized:
    q, scale = expect.quantized("x", x)
    expect.seed_on(seed, q)
    expect.choice("layout", layout, Layout)
    found = drop(q, scale, seed, p, x.block, layout, out_block)
    return Quantized.of(found, layout, out_block or x.block)
