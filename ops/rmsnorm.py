"""RMSNorm and its gradient on quantised tensors, statistics and reductions over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.operators import Operator
from jetfire.core.problem import AS_READ, Block, Layout, Mode, Rounding
from jetfire.core.tensors import Quantized, Tensors
from jetfire.measure.bounds import NOISE, OVER, ROUNDING, overflows, worst
from jetfire.measure.norm import Evaluated, Norm, NormProblem, forward_bounds, of_stream

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_rmsnorm", "int8_rmsnorm_add_backward", "int8_rmsnorm_backward"]


@dataclass(frozen=True)
class RmsNormProblem(NormProblem):
    """fwd: x (m×n) to y = x·rstd·weight, and rstd; bwd: x, dy and rstd to dx and dweight.

    rstd is 1/√(mean(x²) + eps) of each row. x, dy, y and dx are quantised per block.

    A row whose sum of squares is beyond fp32 has no statistics: as in torch its rstd is 0 or NaN.
    """

    block: Block = 32
    out_block: Block = AS_READ
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5
    residual: bool = False


class RmsNorm(Norm):
    name = "rmsnorm"
    summary = "RMSNorm and its gradient, INT8 in and out, statistics of whole rows"
    Problem = RmsNormProblem
    same_bits_over = "runs"
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"m": ("dweight",)}
    in_torch = "rms_norm"
    parameters = ("weight",)
    statistics = ("rstd",)

    def of_rows(self, x: Tensor, eps: float) -> Tensors:
        from jetfire.reference.rmsnorm import statistics

        return {"rstd": statistics(x, eps)}

    def forward(self, problem: RmsNormProblem, wide: Tensors) -> Evaluated:
        """Bound rstd by half of what its sum errs by, as squares cancel nothing, and its rounding.

        A mean of squares below 2^-126 may count as 0, as a GPU's approximate square root has it.
        """
        import torch

        from jetfire.reference import rmsnorm

        x = wide["x"]
        rstd = rmsnorm.statistics(x, problem.eps)
        square = x.square().mean(dim=1)
        chain = _chain(problem.n) + 4 * ROUNDING
        least = (square + problem.eps - chain * square - 2.0**-126).clamp(min=0).rsqrt()
        rows = x.square().sum(dim=1) >= OVER
        bound = (least - rstd * (1 - 4 * ROUNDING)).nan_to_num(0.0).masked_fill(rows, torch.inf)
        over, mean = rows | torch.isinf(least), torch.zeros_like(rstd)
        computed = {"mean_bound": mean, "rstd_bound": bound, "row_over": over}
        noises = forward_bounds(problem.out_block, wide, mean, rstd, computed)
        expected = {"rstd": rstd, "rstd_bound": bound, "rstd_over": over}
        return rmsnorm.forward(x, rstd, wide["weight"]), *noises, expected

    def backward(self, problem: RmsNormProblem, wide: Tensors) -> Evaluated:
        """Bound what evaluation adds to dx by the magnitudes of its two terms, which may cancel."""
        import torch

        from jetfire.reference import rmsnorm

        x, dy, weight, rstd = (wide[name] for name in ("x", "dy", "weight", "rstd"))
        value, dweight = rmsnorm.backward(x, dy, weight, rstd, wide.get("dsum"))
        g, xhat = (dy * weight).abs(), x.abs() * rstd[:, None]
        along = xhat * (g * xhat).mean(dim=1, keepdim=True)
        off = (NOISE * g + (NOISE + _chain(problem.n)) * along) * rstd[:, None]
        row_over = torch.maximum(g.sum(dim=1), (g * xhat).sum(dim=1)) >= OVER
        largest = torch.maximum((g + along) * rstd[:, None], g + along)
        size = (dy.abs() * xhat).sum(dim=0)
        # Of x̂ and of the products, to underflow.
        lost = (dy.abs().sum(dim=0) + problem.m) * 2.0**-149
        bound = ((_chain(problem.m) + NOISE) * size + lost).nan_to_num(0.0)
        expected = {"dweight": dweight, "dweight_bound": bound, "dweight_over": size >= OVER}
        over = overflows(largest, problem.out_block, row_over)
        if not problem.residual:
            return value, worst(off, problem.out_block), over, expected
        # Subnormal products lose digits: of slopes, too, which are multiplied by x.
        few = 2.0**-140 * (1 + weight.abs() + rstd[:, None]) * (1 + xhat + along)
        few += 2.0**-148 * x.abs() * (1 + along)
        noise = off + 2 * ROUNDING * value.abs() + few
        over_at = ~(largest < OVER) | row_over[:, None]
        value, bound, stream = of_stream(problem, value, noise, over_at)
        return value, bound, over, expected | stream

    def torch_backward(
        self, x: Tensor, dy: Tensor, weight: Tensor, inputs: Tensors
    ) -> Callable[[], Any]:
        rstd = inputs["rstd"][:, None]
        return lambda: _gradients(x, dy, weight, rstd)


def _gradients(x: Tensor, dy: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor | None, ...]:
    """Return dx and dweight in torch, from the rstd [m, 1] that its forward leaves: fused on a GPU.

    There is no fused one on the CPU, nor under torch 2.7.
    """
    import torch

    if x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        fused: tuple[Tensor | None, ...] = torch.ops.aten._fused_rms_norm_backward(
            dy, x, [x.shape[1]], rstd, weight, [True, True]
        )
        return fused
    xhat, g = x * rstd, dy * weight
    dx = (g - xhat * (g * xhat).mean(dim=1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy * xhat).sum(dim=0).to(x.dtype)


def _chain(n: int) -> float:
    """Return what adding up n terms errs by, relatively to the sum of their magnitudes.

    Kernels add at most n/32 numbers to one another and then, in pairs, what those sums leave.
    """
    return (n / 32 + 32) * ROUNDING


OP = RmsNorm()

_rmsnorm = Operator(
    "rmsnorm(Tensor x, Tensor x_scale, Tensor weight, Tensor? seed, int block, float eps,"
    " str rounding, str layout, int? out_block=None) -> Tensor[]",
)
_rmsnorm_backward = Operator(
    "rmsnorm_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor rstd, Tensor? seed, int block, str rounding, str layout, int? out_block=None)"
    " -> Tensor[]",
)
_rmsnorm_add_backward = Operator(
    "rmsnorm_add_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor rstd, Tensor dsum, Tensor? seed, int block, str rounding, str layout,"
    " int? out_block=None) -> Tensor[]",
    op="rmsnorm",
    residual=True,
)


@checked
def int8_rmsnorm(
    x: Quantized,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Quantized, Tensor]:
    """Return RMSNorm of whole rows, quantised (Zhang and Sennrich, arXiv 1910.07467, equation 4).

    Args:
        weight: fp32, n.
        out_block: the block of the result's codes; None is that of x.

    Returns:
        y, quantised; rstd, fp32, m: 1/√(mean(x²) + eps).
    """
    q, scale = expect.quantized("x", x)
    weight = expect.vector("weight", weight, q.shape[1], q)
    seed = expect.rounding_seed(rounding, seed, layout, q)
    *y, rstd = _rmsnorm(q, scale, weight, seed, x.block, eps, rounding, layout, out_block)
    return Quantized.of(y, layout, out_block or x.block), rstd


@checked
def int8_rmsnorm_backward(
    x: Quantized,
    dy: Quantized,
    weight: Tensor,
    rstd: Tensor,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Quantized, Tensor]:
    """Return the gradients of `int8_rmsnorm`, through rstd as well.

    Args:
        out_block: the block of dx's codes; None is that of x.

    Returns:
        dx, quantised; dweight, fp32, n.
    """
    operands = expect.norm_backward(x, dy, weight, rstd=rstd)
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    *dx, dweight = _rmsnorm_backward(*operands, seed, x.block, rounding, layout, out_block)
    return Quantized.of(dx, layout, out_block or x.block), dweight


@checked
def int8_rmsnorm_add_backward(
    x: Quantized,
    dy: Quantized,
    weight: Tensor,
    rstd: Tensor,
    dsum: Tensor,
    *,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
) -> tuple[Tensor, Quantized, Tensor]:
    """Return the gradients of `int8_rmsnorm`, where x is the copy of a residual stream.

    That of x joins the stream's in fp32: `int8_rmsnorm_backward` and `int8_add_backward` in one
    pass, with one rounding fewer.

    Args:
        dsum: the gradient that the stream itself received (m×n bf16).
        out_block: the block of the copy's codes; None is that of x.

    Returns:
        dx, the sum of both (bf16), and its quantised copy; dweight, fp32, n.
    """
    operands = expect.norm_backward(x, dy, weight, rstd=rstd)
    expect.same_shape("dsum", dsum, operands[0], "bfloat16")
    seed = expect.rounding_seed(rounding, seed, layout, operands[0])
    dx, *copy, dweight = _rmsnorm_add_backward(
        *operands, dsum, seed, x.block, rounding, layout, out_block
    )
    return dx, Quantized.of(copy, layout, out_block or x.block), dweight
