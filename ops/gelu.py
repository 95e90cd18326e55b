"""GELU and its gradient on quantised tensors, tanh (GPT-2's) and erf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Gradient, Model
from jetfire.core.operators import Operator
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Problem, Rounding
from jetfire.core.suites import Exported
from jetfire.core.tensors import Quantized, Specs, Tensors, blocks_of, quantized, seed_of
from jetfire.measure import peers
from jetfire.measure.bounds import worst
from jetfire.measure.op import StandardOp, unrounded, values_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_gelu", "int8_gelu_backward"]


Approximate = Literal["tanh", "erf"]


@dataclass(frozen=True)
class GeluProblem(Problem):
    """fwd: x (m×n) to gelu(x); bwd: x and dy to dx = dy·gelu'(x); all quantised per block.

    dx's codes may be written over dy's: kernels read all of a tile before they write any of it.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    approximate: Approximate = "tanh"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Gelu(StandardOp):
    name = "gelu"
    summary = "GELU and its gradient, INT8 in and out"
    Problem = GeluProblem
    modes = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.hidden}]

    def reads(self, problem: GeluProblem) -> Specs:
        m, n, block = problem.m, problem.n, problem.block
        dy = quantized(m, n, block, "dy") if problem.mode == "bwd" else {}
        return quantized(m, n, block, "x") | dy | seed_of(problem)

    def writes(self, problem: GeluProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.out_block, layout=problem.layout)

    def reference(self, problem: GeluProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import gelu

        block, approximate = problem.block, problem.approximate
        x, x_scale = inputs["x"], inputs["x_scale"]
        if problem.mode == "bwd":
            dy, dy_scale = inputs["dy"], inputs["dy_scale"]
            value = gelu.backward(x, x_scale, dy, dy_scale, block, approximate)
        else:
            value = gelu.forward(x, x_scale, block, approximate)
        return unrounded(problem, inputs, value, _noise(problem, inputs, value))

    def in_place(self, problem: GeluProblem, inputs: Tensors) -> dict[str, str]:
        """Return dx over dy, which must be contiguous as an output is."""
        backward = problem.mode == "bwd" and problem.layout == "both"
        return {"q": "dy"} if backward and inputs["dy"].is_contiguous() else {}

    def gradients(self, problem: GeluProblem, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        from torch.nn import functional

        from jetfire.measure import gradient

        x, dy = values_of(problem, inputs, "x", "dy")
        y = functional.gelu(x.requires_grad_(), approximate=_in_torch(problem))
        (dx,) = gradient.of(y, dy, x)
        return gradient.quantised(problem, outputs, dx, gradient.FP32 * dy.abs())

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        targets = {"tiles": "cuda", "triton": "cubin"}
        return [Exported(name, problem, (target,), turn=4) for name, target in targets.items()]

    def eager(self, problem: GeluProblem, inputs: Tensors) -> Callable[[], Any]:
        import torch
        from torch.nn import functional

        wide = peers.widened(inputs, problem.block)
        x, approximate = wide("x"), _in_torch(problem)
        if problem.mode == "fwd":
            return lambda: functional.gelu(x, approximate=approximate)
        dy = wide("dy")
        return lambda: torch.ops.aten.gelu_backward(dy, x, approximate=approximate)


def _in_torch(problem: GeluProblem) -> str:
    """Return the name that torch has for a problem's form of GELU."""
    return "tanh" if problem.approximate == "tanh" else "none"


def _noise(problem: GeluProblem, inputs: Tensors, value: Tensor) -> Tensor:
    """Return by block of the result what evaluation in fp32 may add to a value.

    Where gelu' crosses 0 its two terms cancel, and what an exponential of y or our fit of Φ is off
    by, 2^-21·|y| and 2^-18 of it, is of either term. A Φ below 2^-100, or a derivative below 2^-76,
    may come as 0: 1/(1 + 2^127) does, times its argument of up to 2^50.
    """

    from jetfire.reference.gelu import gate, slope_terms

    approximate = problem.approximate
    (x,) = values_of(problem, inputs, "x")
    exponent = gate(x, approximate).clamp(min=1e-300).log().abs()
    relative = 2.0**-18 + 2.0**-21 * exponent
    if problem.mode == "fwd":
        noise = relative * value.abs() + 2.0**-100 * x.abs()
    else:
        (dy,) = values_of(problem, inputs, "dy")
        noise = dy.abs() * (relative * slope_terms(x, approximate) + 2.0**-76)
    return worst(noise, problem.out_block)


OP = Gelu()

_gelu = Operator(
    "gelu(Tensor x, Tensor x_scale, Tensor? seed, int block, str approximate, str rounding,"
    " str layout, int? out_block=None) -> Tensor[]",
)
_gelu_backward = Operator(
    "gelu_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor? seed, int"
    " block, str approximate, str rounding, str layout, int? out_block=None) -> Tensor[]",
)
# `q` holds dy's codes, and then dx's.
_gelu_backward_inplace = Operator(
    "gelu_backward_inplace(Tensor x, Tensor x_scale, Tensor(a!) q, Tensor dy_scale,"
    " Tensor(b!) scale, Tensor(c!) qt, Tensor(d!) scale_t, Tensor? seed, int block, str"
    " approximate, str rounding, int? out_block=None) -> ()",
    renamed={"dy": "q"},
    layout="both",
)


@checked
def int8_gelu(
    x: Quantized,
    *,
    approximate: Approximate = "tanh",
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> Quantized:
    """Return gelu(x), quantised; `approximate` is "tanh" or "erf".

    Args:
        out_block: the block of the result's codes; None is that of x.
    """
    q, scale = expect.quantized("x", x)
    expect.choice("approximate", approximate, Approximate)
    seed = expect.rounding_seed(rounding, seed, layout, q)
    y = _gelu(q, scale, seed, x.block, approximate, rounding, layout, out_block)
    return Quantized.of(y, layout, out_block or x.block)


@checked
def int8_gelu_backward(
    x: Quantized,
    dy: Quantized,
    *,
    approximate: Approximate = "tanh",
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    inplace: bool = False,
    out_block: Block | None = None,
) -> Quantized:
    """Return dx = dy·gelu'(x), quantised; the rest is as in `int8_gelu`.

    Args:
        inplace: write dx's codes over dy's (contiguous, apart from x's); `layout` is then "both".
    """
    q, scale = expect.quantized("x", x)
    dq, dq_scale = expect.quantized("dy", dy, like=x)
    expect.choice("approximate", approximate, Approximate)
    seed = expect.rounding_seed(rounding, seed, layout, q)
    operands, block = (q, scale, dq, dq_scale), x.block
    if not inplace:
        dx = _gelu_backward(*operands, seed, block, approximate, rounding, layout, out_block)
        return Quantized.of(dx, layout, out_block or block)
    if layout != "both" or not dq.is_contiguous():
        raise UsageError(
            f"inplace with layout={layout}, strides {dq.stride()}: expected "
            "layout=both and contiguous dy"
        )
    refuse_in_place({"dy": dq}, {"x": q})
    m, n = dq.shape
    scales = dq_scale.new_empty(blocks_of(m, n, out_block or block))
    transposed = dq.new_empty((n, m)), scales.new_empty(scales.shape[::-1])
    options = seed, block, approximate, rounding, out_block
    _gelu_backward_inplace(*operands, scales, *transposed, *options)
    return Quantized(dq, scales, *transposed, out_block or block)
