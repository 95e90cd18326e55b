"""Softsign and its gradient on quantised tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Gradient
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Layout, Mode, Problem, Rounding
from jetfire.core.tensors import Quantized, Specs, Tensors, quantized, seed_of
from jetfire.measure import peers
from jetfire.measure.op import StandardOp, unrounded

if TYPE_CHECKING:
    from torch import Tensor

    from jetfire.core.op import Model

__all__ = ["int8_softsign", "int8_softsign_backward"]

# Of two divisions and a sum, each rounded to fp32, twice over.
ROUNDING = 2.0**-22


@dataclass(frozen=True)
class SoftsignProblem(Problem):
    """fwd: x (m×n) to x/(1 + |x|); bwd: x and dy to dx = dy/(1 + |x|)²; all quantised per block."""

    block: Block = 32
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Softsign(StandardOp):
    name = "softsign"
    summary = "softsign and its gradient, INT8 in and out"
    Problem = SoftsignProblem
    untuned = True
    modes = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.hidden}]

    def reads(self, problem: SoftsignProblem) -> Specs:
        m, n, block = problem.m, problem.n, problem.block
        dy = quantized(m, n, block, "dy") if problem.mode == "bwd" else {}
        return quantized(m, n, block, "x") | dy | seed_of(problem)

    def writes(self, problem: SoftsignProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout=problem.layout)

    def reference(self, problem: SoftsignProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import softsign
        from jetfire.reference.quantize import block_amax

        operands = [inputs[name] for name in ("x", "x_scale", "dy", "dy_scale") if name in inputs]
        function = softsign.backward if problem.mode == "bwd" else softsign.forward
        value = function(*operands, problem.block)
        noise = ROUNDING * block_amax(value, problem.block).nan_to_num(0.0)
        return unrounded(problem, inputs, value, noise)

    def gradients(
        self, problem: SoftsignProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        from torch.nn import functional

        from jetfire.measure import gradient

        x = gradient.values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
        dy = gradient.values(inputs["dy"], inputs["dy_scale"], problem.block)
        (dx,) = gradient.of(functional.softsign(x), dy, x)
        return gradient.quantised(problem, outputs, dx, gradient.FP32 * dy.abs())

    def eager(self, problem: SoftsignProblem, inputs: Tensors) -> Callable[[], Any]:
        from torch.nn import functional

        wide = peers.widened(inputs, problem.block)
        x = wide("x")
        if problem.mode == "fwd":
            return lambda: functional.softsign(x)
        dy = wide("dy")
        return lambda: dy / (1 + x.abs()).square()


OP = Softsign()

_softsign = Operator(
    "softsign(Tensor x, Tensor x_scale, Tensor? seed, int block, str rounding, str layout)"
    " -> Tensor[]",
)
_softsign_backward = Operator(
    "softsign_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor? seed,"
    " int block, str rounding, str layout) -> Tensor[]",
)


@checked
def int8_softsign(
    x: Quantized,
    *,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> Quantized:
    """Return x/(1 + |x|), quantised."""
    q, scale = expect.quantized("x", x)
    seed = expect.rounding_seed(rounding, seed, layout, q)
    y = _softsign(q, scale, seed, x.block, rounding, layout)
    return Quantized.of(y, layout, x.block)


@checked
def int8_softsign_backward(
    x: Quantized,
    dy: Quantized,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> Quantized:
    """Return dx = dy/(1 + |x|)², quantised."""
    operands = *expect.quantized("x", x), *expect.quantized("dy", dy, like=x)
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    dx = _softsign_backward(*operands, seed, x.block, rounding, layout)
    return Quantized.of(dx, layout, x.block)
