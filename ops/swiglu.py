"""SwiGLU's elementwise part, silu(gate)·up, and its gradients on quantised tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import (
    Block,
    Check,
    Gradient,
    Layout,
    Mode,
    Op,
    Problem,
    Rounding,
    Tensors,
    quantised_outputs,
)
from jetfire.core.operators import Operator
from jetfire.measure.bounds import overflows, worst
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_swiglu", "int8_swiglu_backward"]

GRADIENTS = ("dgate", "dup")
# A gradient's outputs, by the names that a single quantised output has.
SUFFIXES = {"q": "", "scale": "_scale", "qt": "_t", "scale_t": "_scale_t"}


@dataclass(frozen=True)
class SwigluProblem(Problem):
    """fwd: gate and up (m×n) to y = silu(gate)·up; bwd: these and dy to dgate and dup.

    All are quantised per block. dgate is dy·up·silu'(gate), dup is dy·silu(gate); each comes in
    the layouts asked for, as ``dgate, dgate_scale`` and ``dgate_t, dgate_scale_t``, and so dup.
    Rounded stochastically, each has random bits of its own.
    """

    block: Block = 32
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Swiglu(Op):
    name = "swiglu"
    summary = "SwiGLU's silu(gate)·up and its gradients, INT8 in and out"
    Problem = SwigluProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def gradients(
        self, problem: SwigluProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        from torch.nn.functional import silu

        from jetfire.measure import gradient

        gate, up, dy = (
            gradient.values(inputs[name], inputs[f"{name}_scale"], problem.block)
            for name in ("gate", "up", "dy")
        )
        gate, up = gate.requires_grad_(), up.requires_grad_()
        dgate, dup = gradient.of(silu(gate) * up, dy, gate, up)
        terms = {"dgate": (dy * up.detach()).abs(), "dup": (dy * gate.detach()).abs()}
        found = []
        for name, exact in (("dgate", dgate), ("dup", dup)):
            mine = {part: outputs[f"{name}{suffix}"] for part, suffix in SUFFIXES.items()
                    if f"{name}{suffix}" in outputs}  # fmt: skip
            noise = gradient.FP32 * terms[name]
            found += [replace(one, name=f"{name}{SUFFIXES[one.name]}")
                      for one in gradient.quantised(problem, mine, exact, noise)]  # fmt: skip
        return found

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.hidden}]

    def inputs(
        self, problem: SwigluProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        inputs: Tensors = {}
        for name in ("gate", "up", "dy") if problem.mode == "bwd" else ("gate", "up"):
            codes, scale = source.quantised(problem.m, problem.n, problem.block)
            inputs |= {name: codes, f"{name}_scale": scale}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: SwigluProblem, inputs: Tensors) -> Tensors:
        device = inputs["gate"].device

        def outputs() -> Tensors:
            return quantised_outputs(problem, device, problem.layout, problem.m, problem.n)

        if problem.mode == "fwd":
            return outputs()
        return {
            f"{name}{SUFFIXES[part]}": tensor
            for name in GRADIENTS
            for part, tensor in outputs().items()
        }

    def reference(self, problem: SwigluProblem, inputs: Tensors) -> Tensors:
        """Values in float64 and what fp32 may add to them, each output's under its own name."""
        from jetfire.reference.philox import STREAM_ROUNDING, STREAM_SECOND, uniform
        from jetfire.reference.quantize import scales

        backward = problem.mode == "bwd"
        expected = _backward(problem, inputs) if backward else _forward(problem, inputs)
        for name in _results(problem):
            expected[f"{name}_scale"] = scales(expected[name].float(), problem.block)[0]
            if problem.rounding == "stochastic":
                stream = STREAM_SECOND if name == "dup" else STREAM_ROUNDING
                expected[f"{name}_u"] = uniform(inputs["seed"], problem.m, problem.n, stream)
        return expected

    def check(
        self,
        problem: SwigluProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        checks = []
        for name in _results(problem):
            found = check.quantised(
                _named(outputs, name),
                expected[name],
                expected[f"{name}_scale"],
                problem.block,
                expected.get(f"{name}_u"),
                noise=expected[f"{name}_noise"],
                over=expected[f"{name}_over"],
            )
            checks.append(
                found if found.ok else replace(found, message=f"{name}'s {found.message}")
            )
        return check.every(checks)

    def peers(
        self, problem: SwigluProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """torch's silu and products, or what its autograd runs for them, of BF16 tensors."""
        import torch
        from torch.nn import functional

        from jetfire.measure import peers

        wide = peers.widened(inputs, problem.block)
        gate, up = wide("gate"), wide("up")
        if problem.mode == "fwd":

            def eager() -> Any:
                return functional.silu(gate) * up

        else:
            dy, kept = wide("dy"), functional.silu(gate)

            def eager() -> Any:
                return torch.ops.aten.silu_backward(dy * up, gate), dy * kept

        return peers.elementwise(eager, self.bytes(problem), gate.device)


def _results(problem: SwigluProblem) -> tuple[str, ...]:
    return GRADIENTS if problem.mode == "bwd" else ("y",)


def _named(outputs: Tensors, result: str) -> Tensors:
    """The outputs of one result, by the names that a single quantised output has."""
    if result == "y":
        return outputs
    named = {part: f"{result}{suffix}" for part, suffix in SUFFIXES.items()}
    return {part: outputs[name] for part, name in named.items() if name in outputs}


def _relative(z: torch.Tensor) -> torch.Tensor:
    """What evaluation in fp32 may be off by, of σ(z) relatively.

    An approximate reciprocal and products, 2^-20; an exponential of z, 2^-22·|z|, for its argument
    is rounded.
    """
    return 2.0**-20 + 2.0**-22 * z.abs().clamp(max=1000.0)


def _give(
    problem: SwigluProblem, name: str, value: torch.Tensor, noise: torch.Tensor, size: torch.Tensor
) -> Tensors:
    """Return a result, by block what evaluation may add to it, and where that may overflow.

    Args:
        size: the magnitude of its factors' product without silu's decay.
    """
    return {
        name: value,
        f"{name}_noise": worst(noise, problem.block),
        f"{name}_over": overflows(size, problem.block),
    }


def _inputs(problem: SwigluProblem, inputs: Tensors) -> list[torch.Tensor]:
    """Gate, up and, for backward, dy as float64."""
    import torch

    from jetfire.reference.dequantize import dequantize

    return [
        dequantize(inputs[name], inputs[f"{name}_scale"], problem.block, torch.float64)
        for name in ("gate", "up", "dy")
        if name in inputs
    ]


def _forward(problem: SwigluProblem, inputs: Tensors) -> Tensors:
    """A σ below 2^-100 may come as 0."""
    from jetfire.reference import swiglu

    gate, up = _inputs(problem, inputs)
    value = swiglu.silu(gate) * up
    size = (gate * up).abs()
    return _give(problem, "y", value, _relative(gate) * value.abs() + 2.0**-100 * size, size)


def _backward(problem: SwigluProblem, inputs: Tensors) -> Tensors:
    """The derivative's two terms cancel where it crosses 0: what is off is of their magnitudes.

    A σ below 2^-100 may come as 0, and a derivative below 2^-93, of it times z + 1.
    """
    from jetfire.reference import swiglu

    gate, up, dy = _inputs(problem, inputs)
    relative, terms = _relative(gate), swiglu.slope_terms(gate)
    dgate, size = dy * up * swiglu.silu_grad(gate), (dy * up).abs()
    results = _give(problem, "dgate", dgate, size * (relative * terms + 2.0**-93), size)
    dup, size = dy * swiglu.silu(gate), (dy * gate).abs()
    return results | _give(problem, "dup", dup, relative * dup.abs() + 2.0**-100 * size, size)


OP = Swiglu()

_swiglu = Operator(
    "swiglu(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor? seed, int block,"
    " str rounding, str layout) -> Tensor[]",
    mode="fwd",
)
_swiglu_backward = Operator(
    "swiglu_backward(Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor dy,"
    " Tensor dy_scale, Tensor? seed, int block, str rounding, str layout) -> Tensor[]",
    mode="bwd",
    op="swiglu",
)


@checked
def int8_swiglu(
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Return silu(gate)·up, quantised: SwiGLU without its products (arXiv 2002.05202, equation 6).

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    expect.codes("gate", gate, gate_scale, block)
    expect.codes("up", up, up_scale, block, like=gate)
    seed = expect.rounding_seed(rounding, seed, layout, gate)
    return tuple(_swiglu(gate, gate_scale, up, up_scale, seed, block, rounding, layout))


@checked
def int8_swiglu_backward(
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Return dgate = dy·up·silu'(gate) and dup = dy·silu(gate), both quantised.

    Rounded stochastically, each draws random bits of its own from the one seed.

    Returns:
        First dgate, then dup, each as `layout` says: q, scale and/or qt, scale_t.
    """
    expect.codes("gate", gate, gate_scale, block)
    expect.codes("up", up, up_scale, block, like=gate)
    expect.codes("dy", dy, dy_scale, block, like=gate)
    seed = expect.rounding_seed(rounding, seed, layout, gate)
    operands = (gate, gate_scale, up, up_scale, dy, dy_scale, seed)
    return tuple(_swiglu_backward(*operands, block, rounding, layout))
