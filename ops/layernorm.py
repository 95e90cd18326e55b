"""LayerNorm and its gradient on quantised tensors, statistics and reductions over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import SameBits
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Rounding
from jetfire.core.suites import Exported
from jetfire.core.tensors import Quantized, Tensors
from jetfire.measure.bounds import (
    NOISE,
    OVER,
    ROUNDING,
    of_sum,
    overflows,
    statistics_bounds,
    worst,
)
from jetfire.measure.norm import Evaluated, Norm, NormProblem, forward_bounds, of_stream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_layernorm", "int8_layernorm_add_backward", "int8_layernorm_backward"]


@dataclass(frozen=True)
class LayerNormProblem(NormProblem):
    """fwd: x (m×n) to x̂·weight + bias; bwd: x, dy and x's statistics to dx, dweight, dbias.

    x, dy, y and dx are quantised per block. ``stats="given"``: forward takes ``mean`` and ``rstd``
    (from `add`); ``"row"``: it computes and returns them. Backward always takes them.

    A row whose sum of squares is beyond fp32 has no statistics: as in torch its rstd is 0 or NaN.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    stats: Literal["row", "given"] = "row"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5
    residual: bool = False


class LayerNorm(Norm):
    name = "layernorm"
    summary = "LayerNorm and its gradient, INT8 in and out, statistics of whole rows"
    Problem = LayerNormProblem
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"m": ("dweight", "dbias")}
    in_torch = "layer_norm"
    parameters = ("weight", "bias")
    statistics = ("mean", "rstd")

    def given(self, problem: LayerNormProblem) -> bool:
        return problem.mode == "bwd" or problem.stats == "given"

    def of_rows(self, x: Tensor, eps: float) -> Tensors:
        from jetfire.reference.layernorm import statistics

        return dict(zip(self.statistics, statistics(x, eps), strict=True))

    def forward(self, problem: LayerNormProblem, wide: Tensors) -> Evaluated:
        from jetfire.reference import layernorm

        x, computed = wide["x"], {}
        if problem.stats == "row":
            known = self.of_rows(x, problem.eps)
            wide, computed = wide | known, known | statistics_bounds(x, **known, eps=problem.eps)
        mean, rstd = wide["mean"], wide["rstd"]
        value = layernorm.forward(x, mean, rstd, wide["weight"], wide["bias"])
        return value, *forward_bounds(problem.out_block, wide, mean, rstd, computed), computed

    def backward(self, problem: LayerNormProblem, wide: Tensors) -> Evaluated:
        """Bound column sums, which are chains of at most m/32 + 64 additions."""
        import torch

        from jetfire.reference import layernorm

        x, dy, weight, mean, rstd = (wide[k] for k in ("x", "dy", "weight", "mean", "rstd"))
        value, *sums = layernorm.backward(x, dy, weight, mean, rstd, wide.get("dsum"))
        g = (dy * weight).abs()
        # |x̂| with nothing cancelled: what its rounding errors are relative to.
        xhat = (x.abs() + mean.abs()[:, None]) * rstd[:, None]
        rows = g.mean(dim=1, keepdim=True) + xhat * (g * xhat).mean(dim=1, keepdim=True)
        terms = (g + rows) * rstd[:, None]
        row_over = torch.maximum(g.sum(dim=1), (g * xhat).sum(dim=1)) >= OVER
        largest = torch.maximum(terms, g + rows)
        over = overflows(largest, problem.out_block, row_over)
        chain = max(1e-5, (problem.m / 32 + 64) * ROUNDING)
        expected: Tensors = {}
        sizes = (dy.abs() * xhat).sum(dim=0), dy.abs().sum(dim=0)
        for name, total, size in zip(self.sums["m"], sums, sizes, strict=True):
            expected |= of_sum(name, total, size, chain, problem.m * 2.0**-149)
        if not problem.residual:
            return value, worst(NOISE * terms, problem.out_block), over, expected
        # A row's means are chains of at most n/512 + 32 additions. Subnormal products lose digits:
        # of slopes, too, which are multiplied by x and the mean.
        of_rows = (problem.n / 512 + 32) * ROUNDING * rows
        few = 2.0**-140 * (1 + weight.abs() + rstd[:, None]) * (1 + xhat + rows)
        few += 2.0**-148 * (x.abs() + mean.abs()[:, None]) * (1 + rows)
        noise = NOISE * terms + of_rows * rstd[:, None] + 2 * ROUNDING * value.abs() + few
        over_at = ~(largest < OVER) | row_over[:, None]
        value, bound, stream = of_stream(problem, value, noise, over_at)
        return value, bound, over, expected | stream

    def same_bits(self, problem: LayerNormProblem) -> SameBits:
        return "configs" if problem.mode == "fwd" and problem.stats == "given" else "runs"

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Return those of ops in general; forward, too, with statistics that it is given."""
        given = {"rounding": ["nearest"], "stats": ["given"]}
        return [*super().settings(mode), *([given] if mode == "fwd" else [])]

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        return [Exported("gluon", problem, ("cubin",), turn=5)]

    def torch_backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, inputs: Tensors
    ) -> Callable[[], Any]:
        import torch

        # What torch's forward leaves for its backward: fp32 on a GPU, BF16 on the CPU.
        kept = torch.float32 if x.is_cuda else torch.bfloat16
        mean, rstd = (inputs[name][:, None].to(kept) for name in self.statistics)
        operands = dy, x, [x.shape[1]], mean, rstd, weight, torch.zeros_like(weight)

        return lambda: torch.ops.aten.native_layer_norm_backward(*operands, [True, True, True])


OP = LayerNorm()


def _statistics(x: Shape, mean: Shape | None) -> dict[str, Any]:
    return {"m": x[0], "n": x[1], "stats": "row" if mean is None else "given"}


_layernorm = Operator(
    "layernorm(Tensor x, Tensor x_scale, Tensor weight, Tensor bias, Tensor? mean, Tensor?"
    " rstd, Tensor? seed, int block, float eps, str rounding, str layout, int? out_block=None)"
    " -> Tensor[]",
    derive=_statistics,
)
_layernorm_backward = Operator(
    "layernorm_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor mean, Tensor rstd, Tensor? seed, int block, str rounding, str layout, int?"
    " out_block=None) -> Tensor[]",
)
_layernorm_add_backward = Operator(
    "layernorm_add_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor mean, Tensor rstd, Tensor dsum, Tensor? seed, int block, str rounding, str layout,"
    " int? out_block=None) -> Tensor[]",
    op="layernorm",
    residual=True,
)


@checked
def int8_layernorm(
    x: Quantized,
    weight: Tensor,
    bias: Tensor,
    *,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Quantized, Tensor, Tensor]:
    """Return LayerNorm of whole rows, quantised, and the rows' mean and rstd, fp32, m.

    Args:
        weight, bias: fp32, n.
        mean, rstd: the statistics where known (from `int8_add`), to be handed back; both or
            neither.
        out_block: the block of the result's codes; None is that of x.
    """
    q, scale = expect.quantized("x", x)
    m, n = q.shape
    weight, bias = expect.vector("weight", weight, n, q), expect.vector("bias", bias, n, q)
    if (mean is None) != (rstd is None):
        raise UsageError("mean and rstd: expected both or neither")
    if mean is not None and rstd is not None:
        mean, rstd = expect.vector("mean", mean, m, q), expect.vector("rstd", rstd, m, q)
    seed = expect.rounding_seed(rounding, seed, layout, q)
    found = _layernorm(
        q, scale, weight, bias, mean, rstd, seed, x.block, eps, rounding, layout, out_block
    )
    if mean is None or rstd is None:
        *found, mean, rstd = found
    return Quantized.of(found, layout, out_block or x.block), mean, rstd


@checked
def int8_layernorm_backward(
    x: Quantized,
    dy: Quantized,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Quantized, Tensor, Tensor]:
    """Return the gradients of `int8_layernorm`, through the statistics as well.

    Args:
        out_block: the block of dx's codes; None is that of x.

    Returns:
        dx, quantised; dweight and dbias, fp32, n.
    """
    operands = expect.norm_backward(x, dy, weight, mean=mean, rstd=rstd)
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    *dx, dweight, dbias = _layernorm_backward(*operands, seed, x.block, rounding, layout, out_block)
    return Quantized.of(dx, layout, out_block or x.block), dweight, dbias


@checked
def int8_layernorm_add_backward(
    x: Quantized,
    dy: Quantized,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dsum: Tensor,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Tensor, Quantized, Tensor, Tensor]:
    """Return the gradients of `int8_layernorm`, where x is the copy of a residual stream.

    That of x joins the stream's in fp32: `int8_layernorm_backward` and `int8_add_backward` in one
    pass, with one rounding fewer.

    Args:
        dsum: the gradient that the stream itself received (m×n bf16).
        out_block: the block of the copy's codes; None is that of x.

    Returns:
        dx, the sum of both (bf16), and its quantised copy; dweight and dbias, fp32, n.
    """
    operands = expect.norm_backward(x, dy, weight, mean=mean, rstd=rstd)
    expect.same_shape("dsum", dsum, operands[0], "bfloat16")
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    dx, *copy, dweight, dbias = _layernorm_add_backward(
        *operands, dsum, seed, x.block, rounding, layout, out_block
    )
    return dx, Quantized.of(copy, layout, out_block or x.block), dweight, dbias
