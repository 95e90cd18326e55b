"""SwiGLU's elementwise part, silu(gate)·up, and its gradients on quantised tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Gradient, Model
from jetfire.core.operators import Operator
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Problem, Rounding
from jetfire.core.tensors import Quantized, Specs, Tensors, quantized, seed_of
from jetfire.measure import peers
from jetfire.measure.bounds import overflows, worst
from jetfire.measure.op import StandardOp, unrounded, values_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_swiglu", "int8_swiglu_backward"]

GRADIENTS = ("dgate", "dup")


@dataclass(frozen=True)
class SwigluProblem(Problem):
    """fwd: gate and up (m×n) to y = silu(gate)·up; bwd: these and dy to dgate and dup.

    All are quantised per block. dgate is dy·up·silu'(gate), dup is dy·silu(gate); each comes in
    the layouts asked for, as ``dgate, dgate_scale`` and ``dgate_t, dgate_scale_t``, and so dup.
    Rounded stochastically, each has random bits of its own.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Swiglu(StandardOp):
    name = "swiglu"
    summary = "SwiGLU's silu(gate)·up and its gradients, INT8 in and out"
    Problem = SwigluProblem
    modes = ("fwd", "bwd")

    def gradients(
        self, problem: SwigluProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        from torch.nn.functional import silu

        from jetfire.measure import gradient

        gate, up, dy = values_of(problem, inputs, "gate", "up", "dy")
        gate, up = gate.requires_grad_(), up.requires_grad_()
        dgate, dup = gradient.of(silu(gate) * up, dy, gate, up)
        of_gate = gradient.FP32 * (dy * up.detach()).abs()
        of_up = gradient.FP32 * (dy * gate.detach()).abs()
        return [
            *gradient.quantised(problem, outputs, dgate, of_gate, "dgate"),
            *gradient.quantised(problem, outputs, dup, of_up, "dup"),
        ]

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.hidden}]

    def reads(self, problem: SwigluProblem) -> Specs:
        specs: Specs = {}
        for name in ("gate", "up", "dy") if problem.mode == "bwd" else ("gate", "up"):
            specs |= quantized(problem.m, problem.n, problem.block, name)
        return specs | seed_of(problem)

    def writes(self, problem: SwigluProblem) -> Specs:
        specs: Specs = {}
        for name in GRADIENTS if problem.mode == "bwd" else ("q",):
            specs |= quantized(problem.m, problem.n, problem.out_block, name, problem.layout)
        return specs

    def reference(self, problem: SwigluProblem, inputs: Tensors) -> Tensors:
        return (_backward if problem.mode == "bwd" else _forward)(problem, inputs)

    def eager(self, problem: SwigluProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's silu and products, or what its autograd runs for them, of BF16 tensors."""
        import torch
        from torch.nn import functional

        wide = peers.widened(inputs, problem.block)
        gate, up = wide("gate"), wide("up")
        if problem.mode == "fwd":
            return lambda: functional.silu(gate) * up
        dy, kept = wide("dy"), functional.silu(gate)
        return lambda: (torch.ops.aten.silu_backward(dy * up, gate), dy * kept)


def _relative(z: Tensor) -> Tensor:
    """Return what evaluation in fp32 may be off by, of σ(z) relatively.

    An approximate reciprocal and products, 2^-20; an exponential of z, 2^-22·|z|, for its argument
    is rounded.
    """
    return 2.0**-20 + 2.0**-22 * z.abs().clamp(max=1000.0)


def _forward(problem: SwigluProblem, inputs: Tensors) -> Tensors:
    """Return y and its bounds: a σ below 2^-100 may come as 0."""
    from jetfire.reference import swiglu

    gate, up = values_of(problem, inputs, "gate", "up")
    value = swiglu.silu(gate) * up
    size = (gate * up).abs()  # the product without silu's decay
    noise = worst(_relative(gate) * value.abs() + 2.0**-100 * size, problem.out_block)
    return unrounded(problem, inputs, value, noise, overflows(size, problem.out_block))


def _backward(problem: SwigluProblem, inputs: Tensors) -> Tensors:
    """Return dgate and dup and their bounds.

    The derivative's two terms cancel where it crosses 0: what is off is of their magnitudes. A σ
    below 2^-100 may come as 0, and a derivative below 2^-93, of it times z + 1.
    """
    from jetfire.reference import swiglu

    gate, up, dy = values_of(problem, inputs, "gate", "up", "dy")
    relative = _relative(gate)
    dgate, gate_size = dy * up * swiglu.silu_grad(gate), (dy * up).abs()
    dup, up_size = dy * swiglu.silu(gate), (dy * gate).abs()
    gate_off = relative * swiglu.slope_terms(gate) * gate_size + 2.0**-93 * gate_size
    up_off = relative * dup.abs() + 2.0**-100 * up_size
    expected: Tensors = {}
    for name, value, off, size in (
        ("dgate", dgate, gate_off, gate_size),
        ("dup", dup, up_off, up_size),
    ):
        noise, over = worst(off, problem.out_block), overflows(size, problem.out_block)
        expected |= unrounded(problem, inputs, value, noise, over, name, second=name == "dup")
    return expected


OP = Swiglu()

_swiglu = Operator(
    "swiglu(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor? seed, int block,"
    " str rounding, str layout, int? out_block=None) -> Tensor[]",
)
_swiglu_backward = Operator(
    "swiglu_backward(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor dy,"
    " Tensor dy_scale, Tensor? seed, int block, str rounding, str layout, int? out_block=None)"
    " -> Tensor[]",
)
_swiglu_backward_joined = Operator(
    "swiglu_backward.joined(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor dy,"
    " Tensor dy_scale, Tensor? seed, int block, str rounding, str layout, int? out_block=None)"
    " -> Tensor[]",
    joined=True,
)


@checked
def int8_swiglu(
    gate: Quantized,
    up: Quantized,
    *,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> Quantized:
    """Return silu(gate)·up, quantised: SwiGLU without its products (arXiv 2002.05202, eq. 6).

    Args:
        out_block: the block of the result's codes; None is that of the gate.
    """
    operands = *expect.quantized("gate", gate), *expect.quantized("up", up, like=gate)
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    y = _swiglu(*operands, seed, gate.block, rounding, layout, out_block)
    return Quantized.of(y, layout, out_block or gate.block)


@checked
def int8_swiglu_backward(
    gate: Quantized,
    up: Quantized,
    dy: Quantized,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
    joined: bool = False,
) -> tuple[Quantized, Quantized] | Quantized:
    """Return dgate = dy·up·silu'(gate) and dup = dy·silu(gate), both quantised.

    Rounded stochastically, each draws random bits of its own from the one seed.

    Args:
        out_block: the block of the results' codes; None is that of the gate.
        joined: return [dgate | dup] as one matrix, m×2n, for n a multiple of the results' block:
            what multiplies by both at once needs no copy then.
    """
    operands = (
        *expect.quantized("gate", gate),
        *expect.quantized("up", up, like=gate),
        *expect.quantized("dy", dy, like=gate),
    )
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    options, block = (seed, gate.block, rounding, layout, out_block), out_block or gate.block
    if joined:
        if (n := operands[0].shape[1]) % block:
            raise UsageError(f"joined with {n} columns: expected a multiple of {block}")
        return Quantized.of(_swiglu_backward_joined(*operands, *options), layout, block)
    found = _swiglu_backward(*operands, *options)
    half = len(found) // 2
    dgate, dup = (Quantized.of(t, layout, block) for t in (found[:half], found[half:]))
    return dgate, dup
