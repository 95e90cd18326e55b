"""The residual addition: a BF16 stream plus an INT8 branch, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Gradient, SameBits
from jetfire.core.operators import Differentiable, Operator
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Rounding
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, quantized, seed_of, with_transpose
from jetfire.measure import peers
from jetfire.measure.bounds import statistics_bounds
from jetfire.measure.norm import RowOp, RowProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_add", "int8_add_backward"]


@dataclass(frozen=True)
class AddProblem(RowProblem):
    """A BF16 m×n stream plus a quantised m×n tensor.

    fwd: ``x`` and the branch's ``y`` to ``sum``, its quantised copy, and the ``mean`` and ``rstd``
    of the sum's rows, for the LayerNorm that comes next (`eps` is that LayerNorm's).
    bwd: the stream's gradient ``dsum`` and the ``dq`` that the quantised copy received, to ``dx``
    and its quantised copy, for the branch's GEMMs.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5


class Add(RowOp):
    name = "add"
    summary = "residual addition, BF16 stream + INT8 branch, with row statistics"
    Problem = AddProblem

    def reads(self, problem: AddProblem) -> Specs:
        m, n, (stream, branch) = problem.m, problem.n, _names(problem)
        codes = quantized(m, n, problem.block, branch)
        return {stream: Spec("bf16", (m, n))} | codes | seed_of(problem)

    def writes(self, problem: AddProblem) -> Specs:
        m, n = problem.m, problem.n
        total = {"dx" if problem.mode == "bwd" else "sum": Spec("bf16", (m, n))}
        specs = total | quantized(m, n, problem.out_block, layout=problem.layout)
        names = () if problem.mode == "bwd" else ("mean", "rstd")
        return specs | dict.fromkeys(names, Spec("fp32", (m,)))

    def reference(self, problem: AddProblem, inputs: Tensors) -> Tensors:
        """Return what has equal bits, and of the statistics what sums in fp32 may add."""
        from jetfire.reference.add import add
        from jetfire.reference.layernorm import statistics
        from jetfire.reference.quantize import quantize

        stream, branch = _names(problem)
        total = add(inputs[stream], inputs[branch], inputs[f"{branch}_scale"], problem.block)
        seed = inputs.get("seed")
        copy = with_transpose(*quantize(total, problem.out_block, problem.rounding, seed))
        if problem.mode == "bwd":
            return {"dx": total, **copy}
        wide = total.double()
        mean, rstd = statistics(wide, problem.eps)
        bounds = statistics_bounds(wide, mean, rstd, problem.eps)
        return {"sum": total, **copy, "mean": mean, "rstd": rstd, **bounds}

    def gradients(self, problem: AddProblem, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        """Return gradients of a sum whose quantised copy passes its own on."""
        import torch

        from jetfire.measure import gradient

        dsum = inputs["dsum"].double()
        dq = gradient.values(inputs["dq"], inputs["dq_scale"], problem.block)
        total = torch.zeros_like(dsum, requires_grad=True)
        copy = total + (total.round() - total).detach()
        (dx,) = torch.autograd.grad((total, copy), total, (dsum, dq))
        noise = gradient.HALF["bf16"] * dx.abs() + 2.0**-22 * (dsum.abs() + dq.abs()) + 2.0**-130
        quantised = gradient.quantised(problem, outputs, dx, noise)
        return [Gradient("dx", outputs["dx"], dx, noise), *quantised]

    def same_bits(self, problem: AddProblem) -> SameBits:
        """Return "runs" forward: statistics are sums over tiles."""
        return "runs" if problem.mode == "fwd" else "kernels"

    def eager(self, problem: AddProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 addition; forward also the statistics that the next LayerNorm needs."""
        import torch

        stream, branch = _names(problem)
        x, y = inputs[stream], peers.widened(inputs, problem.block)(branch)
        if problem.mode == "bwd":
            return lambda: x + y

        def forward() -> Any:
            total = x + y
            variance, mean = torch.var_mean(total.float(), dim=1, correction=0)
            return total, mean, (variance + problem.eps).rsqrt()

        return forward


def _names(problem: AddProblem) -> tuple[str, str]:
    """Return the names of the BF16 and of the quantised tensor."""
    return ("dsum", "dq") if problem.mode == "bwd" else ("x", "y")


OP = Add()


def _keep_stream(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 if ctx.needs_input_grad[0] else 0 :])


def _stream_gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    # One for each argument that was given: torch leaves out a last one that is its default.
    return grads[0], *[None] * (len(ctx.needs_input_grad) - 1)


_add = Differentiable(
    "add(Tensor x, Tensor y, Tensor y_scale, Tensor? seed, int block, float eps, str"
    " rounding, str layout, int? out_block=None) -> Tensor[]",
    leaf=0,
    backward=_stream_gradient,
    setup=_keep_stream,
)
_add_backward = Operator(
    "add_backward(Tensor dsum, Tensor dq, Tensor dq_scale, Tensor? seed, int block, str"
    " rounding, str layout, int? out_block=None) -> Tensor[]",
)


@checked
def int8_add(
    x: Tensor,
    y: Quantized,
    *,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Tensor, Quantized, Tensor, Tensor]:
    """Return the residual stream x (m×n bf16) plus a quantised branch.

    Args:
        out_block: the block of the copy's codes; None is that of y.

    Returns:
        The sum (bf16); its quantised copy; and the mean and rstd (with `eps`) of its rows, fp32, m.
    """
    expect.matrix("the stream", x, ("bfloat16",))
    q, scale = expect.quantized("y", y, like=x)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    total, *copy, mean, rstd = _add(x, q, scale, seed, y.block, eps, rounding, layout, out_block)
    return total, Quantized.of(copy, layout, out_block or y.block), mean, rstd


@checked
def int8_add_backward(
    dsum: Tensor,
    dq: Quantized,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Tensor, Quantized]:
    """Return the stream's gradient (m×n bf16) plus the one that its quantised copy received.

    Args:
        out_block: the block of the copy's codes; None is that of dq.

    Returns:
        dx (bf16), and its quantised copy.
    """
    expect.matrix("dsum", dsum, ("bfloat16",))
    q, scale = expect.quantized("dq", dq, like=dsum)
    seed = expect.rounding_seed(rounding, seed, layout, dsum)
    dx, *copy = _add_backward(dsum, q, scale, seed, dq.block, rounding, layout, out_block)
    return dx, Quantized.of(copy, layout, out_block or dq.block)
