"""RMSNorm and its gradient on quantised tensors, statistics and reductions over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from jetfire.core.operators import Operator
from jetfire.measure.bounds import NOISE, OVER, ROUNDING, overflows, worst
from jetfire.measure.data import Source

if TYPE_CHECKING:
    from random import Random

    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_rmsnorm", "int8_rmsnorm_backward"]


@dataclass(frozen=True)
class RmsNormProblem(Problem):
    """fwd: x (m×n) to y = x·rstd·weight, and rstd; bwd: x, dy and rstd to dx and dweight.

    rstd is 1/√(mean(x²) + eps) of each row. x, dy, y and dx are quantised per block.

    A row whose sum of squares is beyond fp32 has no statistics: as in torch its rstd is 0 or NaN.
    """

    block: Block = 32
    mode: Mode = "fwd"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "eps")


class RmsNorm(Op):
    name = "rmsnorm"
    summary = "RMSNorm and its gradient, INT8 in and out, statistics of whole rows"
    Problem = RmsNormProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"m": ("dweight",)}

    def edges(self, problem: RmsNormProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Weights of all sizes and signs; an rstd that is not the row's own."""
        from jetfire.measure import edges

        rare = {"weight": edges.each(rng, (0.0, 1.0, -1.0, 1e-3, 1e3), inputs["weight"])}
        if "rstd" in inputs:
            rare["rstd"] = edges.each(rng, (0.01, 1.0, 30.0), inputs["rstd"])
        return rare

    def gradients(
        self, problem: RmsNormProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """Empty where the rstd that is given is not that of x's rows."""
        import torch

        from jetfire.measure import gradient

        x = gradient.values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
        dy = gradient.values(inputs["dy"], inputs["dy_scale"], problem.block)
        given = inputs["rstd"].double()
        own = (x.detach().square().mean(dim=1) + problem.eps).rsqrt()
        if not torch.allclose(given, own, 1e-3, 1e-3):
            return []
        weight = inputs["weight"].double().requires_grad_()
        y = torch.nn.functional.rms_norm(x, weight.shape, weight, problem.eps)
        dx, dweight = gradient.of(y, dy, x, weight)
        rstd = given[:, None]
        terms = (dy * weight.detach()).abs().amax(1, keepdim=True)
        normal, fp32 = (x.detach() * rstd).abs(), 10 * gradient.FP32
        of_dx = terms * rstd * fp32 * (1 + normal.amax(1, keepdim=True)) ** 2
        of_weight = (dy.abs() * fp32 * (1 + normal)).sum(0)
        return [
            *gradient.quantised(problem, outputs, dx, of_dx),
            Gradient("dweight", outputs["dweight"], dweight, of_weight),
        ]

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def inputs(
        self, problem: RmsNormProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Values drawn from `data` (backward: dy alone, x is normal), weights around 1."""
        import torch

        from jetfire.reference.dequantize import dequantize
        from jetfire.reference.rmsnorm import statistics

        backward = problem.mode == "bwd"
        source = Source(data, device, seed)
        plain = Source("normal", device, seed + 1) if backward else source
        m, n, block = problem.m, problem.n, problem.block
        x, x_scale = plain.quantised(m, n, block)
        inputs = {"x": x, "x_scale": x_scale, "weight": 1 + 0.2 * source.normal(n)}
        if backward:
            dy, dy_scale = source.quantised(m, n, block)
            inputs |= {"dy": dy, "dy_scale": dy_scale}
            if device.type == "meta":
                inputs["rstd"] = torch.empty(m, dtype=torch.float32, device=device)
            else:
                inputs["rstd"] = statistics(dequantize(x, x_scale, block), problem.eps)
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: RmsNormProblem, inputs: Tensors) -> Tensors:
        import torch

        m, n, device = problem.m, problem.n, inputs["x"].device
        outputs = quantised_outputs(problem, device, problem.layout, m, n)
        name, size = ("dweight", n) if problem.mode == "bwd" else ("rstd", m)
        outputs[name] = torch.empty(size, dtype=torch.float32, device=device)
        return outputs

    def reference(self, problem: RmsNormProblem, inputs: Tensors) -> Tensors:
        """Values in float64, and bounds on what fp32 evaluation may add to them."""
        from jetfire.reference.philox import uniform
        from jetfire.reference.quantize import scales

        backward = problem.mode == "bwd"
        expected = _backward(problem, inputs) if backward else _forward(problem, inputs)
        expected["scale"] = scales(expected["value"].float(), problem.block)[0]
        if problem.rounding == "stochastic":
            expected["u"] = uniform(inputs["seed"], problem.m, problem.n)
        return expected

    def check(
        self,
        problem: RmsNormProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Codes that the exact values allow; rstd and column sums as their terms do."""
        from jetfire.measure import check

        checks = [
            check.quantised(
                outputs,
                expected["value"],
                expected["scale"],
                problem.block,
                expected.get("u"),
                noise=expected["noise"],
                over=expected["over"],
            )
        ]
        for name in ("rstd", "dweight"):
            if name in outputs:
                bound, over = expected[f"{name}_bound"], expected[f"{name}_over"]
                checks.append(check.bounded(name, outputs[name], expected[name], bound, over))
        return check.every(checks)

    def nothing(self, problem: RmsNormProblem, inputs: Tensors, outputs: Tensors) -> None:
        """A row of nothing has no mean of squares: NaN, as torch's mean has it."""
        import torch

        super().nothing(problem, inputs, outputs)
        if "rstd" in outputs:
            outputs["rstd"].fill_(torch.nan)

    def same_bits(self, problem: RmsNormProblem) -> SameBits:
        return "runs"

    def peers(
        self, problem: RmsNormProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """torch's RMSNorm, or its two gradients, of the same BF16 tensors."""
        import torch

        from jetfire.measure import peers

        wide = peers.widened(inputs, problem.block)
        x, weight = wide("x"), inputs["weight"].bfloat16()
        shape = [problem.n]
        if problem.mode == "fwd":

            def eager() -> Any:
                return torch.nn.functional.rms_norm(x, shape, weight, problem.eps)

        else:
            dy = wide("dy")
            rstd = inputs["rstd"][:, None]

            def eager() -> Any:
                return _gradients(x, dy, weight, rstd)

        return peers.elementwise(eager, self.bytes(problem), x.device)


def _gradients(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """dx and dweight in torch, from the rstd [m, 1] that its forward leaves: fused on a GPU.

    There is no fused one on the CPU, nor under torch 2.7.
    """
    import torch

    if x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        fused: tuple[torch.Tensor | None, ...] = torch.ops.aten._fused_rms_norm_backward(
            dy, x, [x.shape[1]], rstd, weight, [True, True]
        )
        return fused
    xhat, g = x * rstd, dy * weight
    dx = (g - xhat * (g * xhat).mean(dim=1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy * xhat).sum(dim=0).to(x.dtype)


def _chain(n: int) -> float:
    """What adding up n terms errs by, relatively to the sum of their magnitudes.

    Kernels add at most n/32 numbers to one another and then, in pairs, what those sums leave.
    """
    return (n / 32 + 32) * ROUNDING


def _forward(problem: RmsNormProblem, inputs: Tensors) -> Tensors:
    """Squares cancel nothing: rstd errs by half of what their sum does, and by its own rounding.

    A mean of squares below 2^-126 may count as 0, as a GPU's approximate square root has it.
    """
    import torch

    from jetfire.reference import rmsnorm
    from jetfire.reference.dequantize import dequantize

    x = dequantize(inputs["x"], inputs["x_scale"], problem.block, torch.float64)
    weight = inputs["weight"].double()
    rstd = rmsnorm.statistics(x, problem.eps)
    square = x.square().mean(dim=1)
    chain = _chain(problem.n) + 4 * ROUNDING
    least = (square + problem.eps - chain * square - 2.0**-126).clamp(min=0).rsqrt()
    rows = x.square().sum(dim=1) >= OVER
    bound = (least - rstd * (1 - 4 * ROUNDING)).nan_to_num(0.0).masked_fill(rows, torch.inf)
    terms = x.abs() * rstd[:, None] * weight.abs()
    off = NOISE * terms + x.abs() * weight.abs() * bound[:, None]
    largest = torch.maximum(terms, torch.maximum(x.abs(), x.abs() * rstd[:, None]))
    return {
        "value": rmsnorm.forward(x, rstd, weight),
        "noise": worst(off, problem.block),
        "over": overflows(largest, problem.block, rows | torch.isinf(least)),
        "rstd": rstd,
        "rstd_bound": bound,
        "rstd_over": rows | torch.isinf(least),
    }


def _backward(problem: RmsNormProblem, inputs: Tensors) -> Tensors:
    """The two terms of dx may cancel: what evaluation adds is of their magnitudes."""
    import torch

    from jetfire.reference import rmsnorm
    from jetfire.reference.dequantize import dequantize

    x = dequantize(inputs["x"], inputs["x_scale"], problem.block, torch.float64)
    dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block, torch.float64)
    weight, rstd = (inputs[name].double() for name in ("weight", "rstd"))
    value, dweight = rmsnorm.backward(x, dy, weight, rstd)
    g, xhat = (dy * weight).abs(), x.abs() * rstd[:, None]
    along = xhat * (g * xhat).mean(dim=1, keepdim=True)
    off = (NOISE * g + (NOISE + _chain(problem.n)) * along) * rstd[:, None]
    row_over = (g * xhat).sum(dim=1) >= OVER
    largest = torch.maximum((g + along) * rstd[:, None], g + along)
    size = (dy.abs() * xhat).sum(dim=0)
    lost = (dy.abs().sum(dim=0) + problem.m) * 2.0**-149  # of x̂ and of the products, to underflow
    bound = ((_chain(problem.m) + NOISE) * size + lost).nan_to_num(0.0)
    return {
        "value": value,
        "noise": worst(off, problem.block),
        "over": overflows(largest, problem.block, row_over),
        "dweight": dweight,
        "dweight_bound": bound,
        "dweight_over": size >= OVER,
    }


OP = RmsNorm()

_rmsnorm = Operator(
    "rmsnorm(Tensor x, Tensor x_scale, Tensor weight, Tensor? seed, int block, float eps,"
    " str rounding, str layout) -> Tensor[]",
    mode="fwd",
)
_rmsnorm_backward = Operator(
    "rmsnorm_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor rstd, Tensor? seed, int block, str rounding, str layout) -> Tensor[]",
    mode="bwd",
    op="rmsnorm",
)


@checked
def int8_rmsnorm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    *,
    block: Block = 32,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Return RMSNorm of whole rows, quantised (Zhang and Sennrich, arXiv 1910.07467, equation 4).

    Args:
        weight: fp32, n.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t; then rstd, fp32, m: 1/√(mean(x²) + eps).
    """
    expect.codes("x", x, x_scale, block)
    weight = expect.vector("weight", weight, x.shape[1], x)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(_rmsnorm(x, x_scale, weight, seed, block, eps, rounding, layout))


@checked
def int8_rmsnorm_backward(
    x: Tensor,
    x_scale: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Return the gradients of `int8_rmsnorm`, through rstd as well.

    Returns:
        dx as `layout` says: q, scale and/or qt, scale_t; then dweight, fp32, n.
    """
    expect.codes("x", x, x_scale, block)
    expect.codes("dy", dy, dy_scale, block, like=x)
    m, n = x.shape
    weight, rstd = expect.vector("weight", weight, n, x), expect.vector("rstd", rstd, m, x)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    operands = (x, x_scale, dy, dy_scale, weight, rstd, seed)
    return tuple(_rmsnorm_backward(*operands, block, rounding, layout))
