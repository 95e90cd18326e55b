"""The residual addition: a BF16 stream plus an INT8 branch, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    SameBits,
    Tensors,
    at_least_zero,
    quantised_outputs,
)
from jetfire.core.operators import Differentiable, Operator
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_add", "int8_add_backward"]


@dataclass(frozen=True)
class AddProblem(Problem):
    """A BF16 m×n stream plus a quantised m×n tensor.

    fwd: ``x`` and the branch's ``y`` to ``sum``, its quantised copy, and the ``mean`` and ``rstd``
    of the sum's rows, for the LayerNorm that comes next (`eps` is that LayerNorm's).
    bwd: the stream's gradient ``dsum`` and the ``dq`` that the quantised copy received, to ``dx``
    and its quantised copy, for the branch's GEMMs.
    """

    block: Block = 32
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "eps")


class Add(Op):
    name = "add"
    summary = "residual addition, BF16 stream + INT8 branch, with row statistics"
    Problem = AddProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def inputs(
        self, problem: AddProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:

        source = Source(data, device, seed)
        stream, branch = ("dsum", "dq") if problem.mode == "bwd" else ("x", "y")
        inputs = {stream: source.floats(problem.m, problem.n, dtype="bf16")}
        codes, scale = source.quantised(problem.m, problem.n, problem.block)
        inputs |= {branch: codes, f"{branch}_scale": scale}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: AddProblem, inputs: Tensors) -> Tensors:
        import torch

        stream = inputs["dsum" if problem.mode == "bwd" else "x"]
        m, device = problem.m, stream.device
        total = torch.empty((m, problem.n), dtype=stream.dtype, device=device)
        quantised = quantised_outputs(problem, device, problem.layout, m, problem.n)
        if problem.mode == "bwd":
            return {"dx": total, **quantised}
        mean, rstd = (torch.empty(m, dtype=torch.float32, device=device) for _ in range(2))
        return {"sum": total, **quantised, "mean": mean, "rstd": rstd}

    def reference(self, problem: AddProblem, inputs: Tensors) -> Tensors:
        from jetfire.ops.layernorm import statistics_bounds
        from jetfire.reference.add import add
        from jetfire.reference.layernorm import statistics
        from jetfire.reference.quantize import quantize

        stream, branch = ("dsum", "dq") if problem.mode == "bwd" else ("x", "y")
        total = add(inputs[stream], inputs[branch], inputs[f"{branch}_scale"], problem.block)
        q, scale = quantize(total, problem.block, problem.rounding, inputs.get("seed"))
        quantised = {"q": q, "scale": scale, "qt": q.t(), "scale_t": scale.t()}
        if problem.mode == "bwd":
            return {"dx": total, **quantised}
        wide = total.double()
        mean, rstd = statistics(wide, problem.eps)
        bounds = statistics_bounds(wide, mean, rstd, problem.eps)
        return {"sum": total, **quantised, "mean": mean, "rstd": rstd, **bounds}

    def check(
        self,
        problem: AddProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Equal bits, but for the statistics, of which it is known what sums in fp32 may add."""
        from jetfire.measure import check

        checks = []
        for name, out in outputs.items():
            if name in ("mean", "rstd"):
                bound, over = expected[f"{name}_bound"], expected[f"{name}_over"]
                checks.append(check.bounded(name, out, expected[name], bound, over))
            else:
                checks.append(check.exact(name, out, expected[name]))
        return check.every(checks)

    def nothing(self, problem: AddProblem, inputs: Tensors, outputs: Tensors) -> None:
        """A row of nothing has no mean: NaN, as `torch.var_mean` has it."""
        import torch

        super().nothing(problem, inputs, outputs)
        for name in {"mean", "rstd"} & outputs.keys():
            outputs[name].fill_(torch.nan)

    def gradients(self, problem: AddProblem, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        """The sum's quantised copy passes its gradient on."""
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
        """The statistics are sums over tiles."""
        return "runs" if problem.mode == "fwd" else "kernels"

    def peers(
        self, problem: AddProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The BF16 addition; forward also the statistics that the next LayerNorm needs."""
        import torch

        from jetfire.measure import peers
        from jetfire.reference.dequantize import dequantize

        stream, branch = ("dsum", "dq") if problem.mode == "bwd" else ("x", "y")
        x = inputs[stream]
        y = dequantize(inputs[branch], inputs[f"{branch}_scale"], problem.block, torch.bfloat16)

        def backward() -> Any:
            return x + y

        def forward() -> Any:
            total = x + y
            variance, mean = torch.var_mean(total.float(), dim=1, correction=0)
            return total, mean, (variance + problem.eps).rsqrt()

        eager = backward if problem.mode == "bwd" else forward
        return peers.elementwise(eager, self.bytes(problem), x.device)


OP = Add()


def _keep_stream(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1 if ctx.needs_input_grad[0] else 0 :])


def _stream_gradient(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    return grads[0], None, None, None, None, None, None, None


_add = Differentiable(
    "add(Tensor x, Tensor y, Tensor y_scale, Tensor? seed, int block, float eps, str"
    " rounding, str layout) -> Tensor[]",
    leaf=0,
    backward=_stream_gradient,
    setup=_keep_stream,
    mode="fwd",
)
_add_backward = Operator(
    "add_backward(Tensor dsum, Tensor dq, Tensor dq_scale, Tensor? seed, int block, str"
    " rounding, str layout) -> Tensor[]",
    mode="bwd",
    op="add",
)


def _addends(name: str, x: Tensor, y: Tensor, y_scale: Tensor, block: Block) -> None:
    expect.matrix("the stream", x, ("bfloat16",))
    expect.codes(name, y, y_scale, block, like=x)


@checked
def int8_add(
    x: Tensor,
    y: Tensor,
    y_scale: Tensor,
    *,
    block: Block = 32,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """The residual stream x (m×n bf16) plus a quantised branch.

    Returns:
        The sum (bf16); its copy as `layout` says: q, scale and/or qt, scale_t; and the mean and
        rstd (with `eps`) of its rows, fp32, m.
    """
    _addends("y", x, y, y_scale, block)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(_add(x, y, y_scale, seed, block, eps, rounding, layout))


@checked
def int8_add_backward(
    dsum: Tensor,
    dq: Tensor,
    dq_scale: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """The stream's gradient (m×n bf16) plus the one that its quantised copy received.

    Returns:
        dx (bf16), and its copy as `layout` says: q, scale and/or qt, scale_t.
    """
    _addends("dq", dsum, dq, dq_scale, block)
    seed = expect.rounding_seed(rounding, seed, layout, dsum)
    return tuple(_add_backward(dsum, dq, dq_scale, seed, block, rounding, layout))
