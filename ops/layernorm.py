"""LayerNorm and its gradient on quantised tensors, statistics and reductions over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from jetfire.core.errors import UsageError
from jetfire.core.operators import Operator
from jetfire.core.suites import Exported
from jetfire.measure.bounds import NOISE, OVER, ROUNDING, overflows, worst
from jetfire.measure.data import Source

if TYPE_CHECKING:
    from random import Random

    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_layernorm", "int8_layernorm_backward"]


@dataclass(frozen=True)
class LayerNormProblem(Problem):
    """fwd: x (m×n) to x̂·weight + bias; bwd: x, dy and x's statistics to dx, dweight, dbias.

    x, dy, y and dx are quantised per block. ``stats="given"``: forward takes ``mean`` and ``rstd``
    (from `add`); ``"row"``: it computes and returns them. Backward always takes them.

    A row whose sum of squares is beyond fp32 has no statistics: as in torch its rstd is 0 or NaN.
    """

    block: Block = 32
    mode: Mode = "fwd"
    stats: Literal["row", "given"] = "row"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "eps")


class LayerNorm(Op):
    name = "layernorm"
    summary = "LayerNorm and its gradient, INT8 in and out, statistics of whole rows"
    Problem = LayerNormProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"m": ("dweight", "dbias")}

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def inputs(
        self, problem: LayerNormProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Values drawn from `data` (backward: dy alone, x is normal), weights around 1."""
        import torch

        from jetfire.reference.dequantize import dequantize
        from jetfire.reference.layernorm import statistics

        backward = problem.mode == "bwd"
        source = Source(data, device, seed)
        plain = Source("normal", device, seed + 1) if backward else source
        m, n, block = problem.m, problem.n, problem.block
        x, x_scale = plain.quantised(m, n, block)
        inputs = {"x": x, "x_scale": x_scale, "weight": 1 + 0.2 * source.normal(n)}
        if backward:
            dy, dy_scale = source.quantised(m, n, block)
            inputs |= {"dy": dy, "dy_scale": dy_scale}
        else:
            inputs["bias"] = 0.2 * source.normal(n)
        if backward or problem.stats == "given":
            if device.type == "meta":
                mean, rstd = (torch.empty(m, dtype=torch.float32, device=device) for _ in range(2))
            else:
                mean, rstd = statistics(dequantize(x, x_scale, block), problem.eps)
            inputs |= {"mean": mean, "rstd": rstd}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: LayerNormProblem, inputs: Tensors) -> Tensors:
        import torch

        m, n, device = problem.m, problem.n, inputs["x"].device
        outputs = quantised_outputs(problem, device, problem.layout, m, n)
        if problem.mode == "bwd":
            outputs |= {
                name: torch.empty(n, dtype=torch.float32, device=device)
                for name in ("dweight", "dbias")
            }
        elif problem.stats == "row":
            outputs |= {
                name: torch.empty(m, dtype=torch.float32, device=device)
                for name in ("mean", "rstd")
            }
        return outputs

    def reference(self, problem: LayerNormProblem, inputs: Tensors) -> Tensors:
        """Values in float64, and bounds on what fp32 evaluation may add where terms cancel."""
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
        problem: LayerNormProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Codes that the exact values allow; statistics and column sums as their terms do."""
        from jetfire.measure import check

        checks = [
            check.quantised(
                outputs, expected["value"], expected["scale"], problem.block, expected.get("u"),
                noise=expected["noise"], over=expected["over"],
            )
        ]  # fmt: skip
        for name in ("mean", "rstd", "dweight", "dbias"):
            if name in outputs:
                bound, over = expected[f"{name}_bound"], expected[f"{name}_over"]
                checks.append(check.bounded(name, outputs[name], expected[name], bound, over))
        return check.every(checks)

    def nothing(self, problem: LayerNormProblem, inputs: Tensors, outputs: Tensors) -> None:
        """A row of nothing has no mean: NaN, as `torch.var_mean` has it."""
        import torch

        super().nothing(problem, inputs, outputs)
        for name in {"mean", "rstd"} & outputs.keys():
            outputs[name].fill_(torch.nan)

    def edges(self, problem: LayerNormProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Weights of all sizes and signs; statistics that are not the row's own."""
        from jetfire.measure import edges

        rare = {"weight": edges.each(rng, (0.0, 1.0, -1.0, 1e-3, 1e3), inputs["weight"])}
        if "bias" in inputs:
            rare["bias"] = edges.each(rng, (0.0, 1.0, -1e3), inputs["bias"])
        if "mean" in inputs:
            rare["mean"] = edges.each(rng, (0.0, 1.0, -3.0), inputs["mean"])
            rare["rstd"] = edges.each(rng, (0.01, 1.0, 30.0), inputs["rstd"])
        return rare

    def gradients(
        self, problem: LayerNormProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """Empty where the statistics that are given are not those of x's rows."""
        import torch

        from jetfire.measure import gradient

        x = gradient.values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
        dy = gradient.values(inputs["dy"], inputs["dy_scale"], problem.block)
        if not _has_statistics(x.detach(), inputs["mean"], inputs["rstd"], problem.eps):
            return []
        weight = inputs["weight"].double().requires_grad_()
        bias = torch.zeros_like(weight, requires_grad=True)
        y = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, problem.eps)
        dx, dweight, dbias = gradient.of(y, dy, x, weight, bias)
        rstd = inputs["rstd"].double()[:, None]
        terms = (dy * weight.detach()).abs().amax(1, keepdim=True)
        normal = ((x.detach() - x.detach().mean(1, keepdim=True)) * rstd).abs()
        # x and the mean in fp32: of a row of one column, or of equal ones, all that is left of it.
        rounded = 2.0**-23 * x.detach().abs().amax(1, keepdim=True) * rstd
        most, fp32 = 1 + normal.amax(1, keepdim=True), 10 * gradient.FP32
        of_dx = terms * rstd * (fp32 * most**2 + 2 * rounded * most)
        of_weight = (dy.abs() * (fp32 * (1 + normal) + rounded)).sum(0)
        return [
            *gradient.quantised(problem, outputs, dx, of_dx),
            Gradient("dweight", outputs["dweight"], dweight, of_weight),
            Gradient("dbias", outputs["dbias"], dbias, fp32 * dy.abs().sum(0)),
        ]

    def same_bits(self, problem: LayerNormProblem) -> SameBits:
        return "configs" if problem.mode == "fwd" and problem.stats == "given" else "runs"

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Forward, too, with statistics that it is given."""
        given = {"rounding": ["nearest"], "stats": ["given"]}
        return [*super().settings(mode), *([given] if mode == "fwd" else [])]

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        return [Exported("gluon", problem, ("cubin",), turn=5)]

    def peers(
        self, problem: LayerNormProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """torch's LayerNorm, or its three gradients, of the same BF16 tensors."""
        import torch

        from jetfire.measure import peers

        wide = peers.widened(inputs, problem.block)
        x, weight = wide("x"), inputs["weight"].bfloat16()
        shape = [problem.n]
        if problem.mode == "fwd":
            bias = inputs["bias"].bfloat16()

            def eager() -> Any:
                return torch.nn.functional.layer_norm(x, shape, weight, bias, problem.eps)

        else:
            dy, bias = wide("dy"), torch.zeros_like(weight)
            # What torch's forward leaves for its backward: fp32 on a GPU, BF16 on the CPU.
            kept = torch.float32 if x.is_cuda else torch.bfloat16
            mean, rstd = (inputs[name][:, None].to(kept) for name in ("mean", "rstd"))

            def eager() -> Any:
                return torch.ops.aten.native_layer_norm_backward(
                    dy, x, shape, mean, rstd, weight, bias, [True, True, True]
                )

        return peers.elementwise(eager, self.bytes(problem), x.device)


def _has_statistics(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float) -> bool:
    """Whether the statistics of a backward are those of its rows, as autograd takes them."""
    import torch

    variance, own = torch.var_mean(x, dim=1, correction=0)
    given = torch.stack([mean.double(), rstd.double()])
    return torch.allclose(given, torch.stack([own, (variance + eps).rsqrt()]), 1e-3, 1e-3)


def statistics_bounds(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, eps: float
) -> Tensors:
    """What computing rows' mean and rstd in fp32 may add to them, and where it may overflow.

    A chain of at most n/512 + 32 additions has as many roundings of the row's mean |x|; the mean's
    error is in every difference from it, beside x's own rounding, and so in the variance, which
    matters where that is small beside the mean's square.

    Args:
        x: float64 m×n; mean, rstd: float64 m, its statistics.
    """
    import torch

    size, variance = x.abs(), (x - mean[:, None]).square().mean(dim=1)
    chain = (x.shape[1] / 512 + 32) * ROUNDING
    of_mean = chain * size.mean(dim=1) + 2.0**-149
    each = ROUNDING * (size.square().mean(dim=1).sqrt() + variance.sqrt()) + of_mean
    of_variance = (2 * variance.sqrt() + each) * each + 2.0**-149
    total = variance + eps
    low = (total - of_variance).clamp(min=0).rsqrt()
    over = (size + mean.abs()[:, None]).square().sum(dim=1) >= OVER
    of_rstd = (low - rstd * (1 - chain - 4 * ROUNDING)).nan_to_num(0.0)
    return {
        "mean_bound": of_mean.nan_to_num(0.0), "mean_over": size.sum(dim=1) >= OVER,
        "rstd_bound": of_rstd.masked_fill(over, torch.inf), "rstd_over": torch.isinf(low) | over,
        "row_over": over,
    }  # fmt: skip


def _forward(problem: LayerNormProblem, inputs: Tensors) -> Tensors:
    import torch

    from jetfire.reference import layernorm
    from jetfire.reference.dequantize import dequantize

    x = dequantize(inputs["x"], inputs["x_scale"], problem.block, torch.float64)
    weight, bias = inputs["weight"].double(), inputs["bias"].double()
    size, given = x.abs(), problem.stats == "given"
    if given:
        mean, rstd = inputs["mean"].double(), inputs["rstd"].double()
        expected: Tensors = {}
        rows = torch.zeros_like(mean, dtype=torch.bool)
    else:
        mean, rstd = layernorm.statistics(x, problem.eps)
        expected = {"mean": mean, "rstd": rstd, **statistics_bounds(x, mean, rstd, problem.eps)}
        rows = expected["row_over"]
    value = layernorm.forward(x, mean, rstd, weight, bias)
    size = size + mean.abs()[:, None]
    terms = size * rstd[:, None] * weight.abs() + bias.abs()
    off = NOISE * terms
    if not given:
        of_mean = (expected["mean_bound"] * rstd)[:, None]
        off += (
            of_mean + (x - mean[:, None]).abs() * expected["rstd_bound"][:, None]
        ) * weight.abs()
    largest = torch.maximum(terms, torch.maximum(size, size * rstd[:, None]))
    over = overflows(largest, problem.block, rows)
    return expected | {"value": value, "noise": worst(off, problem.block), "over": over}


def _backward(problem: LayerNormProblem, inputs: Tensors) -> Tensors:
    """Column sums in chains of at most m/32 + 64 additions."""
    import torch

    from jetfire.reference import layernorm
    from jetfire.reference.dequantize import dequantize

    x = dequantize(inputs["x"], inputs["x_scale"], problem.block, torch.float64)
    dy = dequantize(inputs["dy"], inputs["dy_scale"], problem.block, torch.float64)
    weight, mean, rstd = (inputs[name].double() for name in ("weight", "mean", "rstd"))
    value, dweight, dbias = layernorm.backward(x, dy, weight, mean, rstd)
    g = (dy * weight).abs()
    # |x̂| with nothing cancelled: what its rounding errors are relative to.
    xhat = (x.abs() + mean.abs()[:, None]) * rstd[:, None]
    rows = g.mean(dim=1, keepdim=True) + xhat * (g * xhat).mean(dim=1, keepdim=True)
    terms = (g + rows) * rstd[:, None]
    row_over = torch.maximum(g.sum(dim=1), (g * xhat).sum(dim=1)) >= OVER
    over = overflows(torch.maximum(terms, g + rows), problem.block, row_over)
    chain = max(1e-5, (problem.m / 32 + 64) * ROUNDING)
    expected = {"value": value, "noise": worst(NOISE * terms, problem.block), "over": over}
    for name, total, size in (
        ("dweight", dweight, (dy.abs() * xhat).sum(dim=0)), ("dbias", dbias, dy.abs().sum(dim=0)),
    ):  # fmt: skip
        bound = chain * size.nan_to_num(0.0) + problem.m * 2.0**-149
        expected |= {name: total, f"{name}_bound": bound, f"{name}_over": size >= OVER}
    return expected


OP = LayerNorm()


def _statistics(
    x: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, *rest: Any
) -> dict[str, Any]:
    m, n = x.shape
    return {"m": m, "n": n, "stats": "row" if mean is None else "given"}


_layernorm = Operator(
    "layernorm(Tensor x, Tensor x_scale, Tensor weight, Tensor bias, Tensor? mean, Tensor?"
    " rstd, Tensor? seed, int block, float eps, str rounding, str layout) -> Tensor[]",
    derive=_statistics,
    mode="fwd",
)
_layernorm_backward = Operator(
    "layernorm_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor weight,"
    " Tensor mean, Tensor rstd, Tensor? seed, int block, str rounding, str layout) ->"
    " Tensor[]",
    mode="bwd",
    op="layernorm",
)


@checked
def int8_layernorm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    block: Block = 32,
    eps: float = 1e-5,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """LayerNorm of whole rows, quantised.

    Args:
        weight, bias: fp32, n.
        mean, rstd: fp32, m, the rows' statistics where known (from `int8_add`); both or neither.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t; then mean and rstd unless they were given.
    """
    expect.codes("x", x, x_scale, block)
    m, n = x.shape
    weight, bias = expect.vector("weight", weight, n, x), expect.vector("bias", bias, n, x)
    if (mean is None) != (rstd is None):
        raise UsageError("mean and rstd: expected both or neither")
    if mean is not None and rstd is not None:
        mean, rstd = expect.vector("mean", mean, m, x), expect.vector("rstd", rstd, m, x)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(
        _layernorm(x, x_scale, weight, bias, mean, rstd, seed, block, eps, rounding, layout)
    )


@checked
def int8_layernorm_backward(
    x: Tensor,
    x_scale: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Gradients of `int8_layernorm`, through the statistics as well.

    Returns:
        dx as `layout` says: q, scale and/or qt, scale_t; then dweight and dbias, fp32, n.
    """
    expect.codes("x", x, x_scale, block)
    expect.codes("dy", dy, dy_scale, block, like=x)
    m, n = x.shape
    weight = expect.vector("weight", weight, n, x)
    mean, rstd = expect.vector("mean", mean, m, x), expect.vector("rstd", rstd, m, x)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(
        _layernorm_backward(
            x, x_scale, dy, dy_scale, weight, mean, rstd, seed, block, rounding, layout
        )
    )
