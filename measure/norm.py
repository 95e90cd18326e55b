"""Bases of ops on whole rows (`RowOp`), and of LayerNorm and RMSNorm (`Norm`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.errors import UsageError
from jetfire.core.op import Check, Gradient, Op
from jetfire.core.problem import Mode, Problem, at_least_zero
from jetfire.core.tensors import Spec, Specs, Tensors, quantized, seed_of
from jetfire.measure import peers
from jetfire.measure.bounds import NOISE, bf16_unit, overflows, worst
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp, draw, unrounded, values_of

if TYPE_CHECKING:
    from random import Random

    import torch
    from torch import Tensor

    from jetfire.core.op import Model

# Edge values: weights of all sizes and signs, and statistics that are not the row's own.
ENDS = {
    "weight": (0.0, 1.0, -1.0, 1e-3, 1e3),
    "bias": (0.0, 1.0, -1e3),
    "mean": (0.0, 1.0, -3.0),
    "rstd": (0.01, 1.0, 30.0),
}
# The values of the codes in float64; per block, what evaluation in fp32 may add and whether it may
# overflow; and the expected other outputs.
Evaluated = tuple["Tensor", "Tensor", "Tensor", Tensors]


class RowProblem(Problem):
    """A problem whose rows' variance or mean of squares has `eps` added to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "eps")


class NormProblem(RowProblem):
    """A norm's problem, whose gradient may join that of a residual stream: its last field says so.

    ``residual``: backward also reads ``dsum``, the gradient of the BF16 stream that x is a copy of,
    and writes ``dx``, the sum of both in BF16, rounded once; the codes are those of this sum.
    """

    mode: Mode
    residual: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual and self.mode == "fwd":
            raise UsageError("residual=true mode=fwd: expected mode=bwd")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without a `residual` of False, as without an `out_block`."""
        fields = super().as_dict()
        return fields if self.residual else {k: v for k, v in fields.items() if k != "residual"}

    def stream(self, name: str) -> Specs:
        """Return the spec of a gradient of the residual stream; none where there is no stream."""
        return {name: Spec("bf16", (self.m, self.n))} if self.residual else {}


class RowOp(StandardOp):
    """An op on the residual stream that gives or takes statistics of whole rows."""

    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def nothing(self, problem: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write NaN for the mean of a row of nothing, and its rstd, as `torch.var_mean` has it."""
        import torch

        super().nothing(problem, inputs, outputs)
        for name in {"mean", "rstd"} & outputs.keys():
            outputs[name].fill_(torch.nan)


class Norm(RowOp):
    """A norm of rows: from x and parameters to codes and statistics, and backward.

    `sums` names the outputs of a backward that are the parameters' gradients, in their order.

    Attributes:
        in_torch: the name of torch's function.
        parameters: weight, or weight and bias (fp32, n).
        statistics: per row rstd, or mean and rstd (fp32, m).
    """

    matched: ClassVar[tuple[str, ...]] = (*Op.matched, "residual")
    in_torch: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]
    statistics: ClassVar[tuple[str, ...]]

    @abstractmethod
    def of_rows(self, x: torch.Tensor, eps: float) -> Tensors:
        """Return the statistics of x's rows, in its dtype."""

    @abstractmethod
    def torch_backward(
        self, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, inputs: Tensors
    ) -> Callable[[], Any]:
        """Return a call of torch's own backward on BF16 tensors, as autograd runs it."""

    @abstractmethod
    def forward(self, problem: Any, wide: Tensors) -> Evaluated:
        """Return the expected results of a forward of these inputs, in float64."""

    @abstractmethod
    def backward(self, problem: Any, wide: Tensors) -> Evaluated:
        """Return the expected results of a backward of these inputs, in float64."""

    def given(self, problem: Any) -> bool:
        """Return whether a launch reads statistics rather than compute them."""
        return bool(problem.mode == "bwd")

    def function(self, fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Return the name of the function for some fields: that with `_add_` joins a stream."""
        joins = bool(fields.get("residual"))
        return super().function(fields, [name for name in names if ("_add_" in name) == joins])

    def reads(self, problem: Any) -> Specs:
        m, n, block = problem.m, problem.n, problem.block
        of_columns = dict.fromkeys(self.parameters, Spec("fp32", (n,)))
        if problem.mode == "bwd":
            of_columns = {"weight": of_columns["weight"]} | quantized(m, n, block, "dy")
        of_rows = dict.fromkeys(self.statistics if self.given(problem) else (), Spec("fp32", (m,)))
        read = quantized(m, n, block, "x") | of_columns | of_rows | seed_of(problem)
        return read | problem.stream("dsum")

    def writes(self, problem: Any) -> Specs:
        m, n = problem.m, problem.n
        codes = quantized(m, n, problem.out_block, layout=problem.layout)
        if problem.mode == "bwd":
            codes = problem.stream("dx") | codes
            return codes | dict.fromkeys(self.sums["m"], Spec("fp32", (n,)))
        names = () if self.given(problem) else self.statistics
        return codes | dict.fromkeys(names, Spec("fp32", (m,)))

    def inputs(
        self, problem: Any, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        """Return values drawn from `data` (backward: dy alone, x is normal), weights around 1."""
        from jetfire.reference.dequantize import dequantize

        source, specs = Source(data, device, seed), self.reads(problem)
        plain = Source("normal", device, seed + 1) if problem.mode == "bwd" else source
        drawn = draw(quantized(problem.m, problem.n, problem.block, "x"), plain)
        if self.given(problem):
            x = dequantize(drawn["x"], drawn["x_scale"], problem.block)
            drawn |= self.of_rows(x, problem.eps)
        drawn |= draw({k: v for k, v in specs.items() if k not in drawn}, source)
        for name, usual in (("weight", 1.0), ("bias", 0.0)):
            if name in specs:
                drawn[name] = usual + 0.2 * drawn[name]
        return {name: drawn[name] for name in specs}

    def edges(self, problem: Any, inputs: Tensors, rng: Random) -> Tensors:
        from jetfire.measure import edges

        ends = ((name, values) for name, values in ENDS.items() if name in inputs)
        return {name: edges.each(rng, values, inputs[name]) for name, values in ends}

    def reference(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return float64 values, and bounds on what fp32 evaluation may add where terms cancel."""
        wide = {name: inputs[name].double() for name in (*ENDS, "dsum") if name in inputs}
        codes = [name for name in ("x", "dy") if name in inputs]
        wide |= dict(zip(codes, values_of(problem, inputs, *codes), strict=True))
        evaluate = self.backward if problem.mode == "bwd" else self.forward
        value, noise, over, rest = evaluate(problem, wide)
        return unrounded(problem, inputs, value, noise, over) | rest

    def check(
        self, problem: Any, outputs: Tensors, expected: Tensors, noise: Tensor | None = None
    ) -> Check:
        """Compare codes with those of the dx that they were written beside, where there is one."""
        from jetfire.reference.quantize import scales

        if problem.residual:
            value = outputs["dx"].double()
            scale, _ = scales(value.float(), problem.out_block)
            left_out = {"q_noise", "q_over"}
            known = {name: tensor for name, tensor in expected.items() if name not in left_out}
            expected = known | {"q": value, "scale": scale}
        return super().check(problem, outputs, expected, noise)

    def gradients(self, problem: Any, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        """Return none where the statistics that are given are not those of x's rows."""
        import torch

        from jetfire.measure import gradient

        x, dy = values_of(problem, inputs, "x", "dy")
        own = self.of_rows(x, problem.eps)
        # To fp32, by whose error the gradients may differ: those drawn as inputs are within 1.4e-7.
        if not all(torch.allclose(inputs[k].double(), v, 1e-6, 0.0) for k, v in own.items()):
            return []
        weight = inputs["weight"].double()
        leaves = [x, weight, torch.zeros_like(weight)][: 1 + len(self.parameters)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        norm = getattr(torch.nn.functional, self.in_torch)
        y = norm(leaves[0], weight.shape, *leaves[1:], problem.eps)
        dx, *sums = gradient.of(y, dy, *leaves)
        rstd, fp32 = inputs["rstd"].double()[:, None], 10 * gradient.FP32
        normal, rounded = (x * rstd).abs(), torch.zeros_like(rstd)
        if "mean" in own:
            normal = ((x - own["mean"][:, None]) * rstd).abs()
            # The rounding of x and the mean: all that is left of a row of one or of equal columns.
            rounded = 2.0**-23 * x.abs().amax(1, keepdim=True) * rstd
        terms = (dy * weight).abs().amax(1, keepdim=True)
        most = 1 + normal.amax(1, keepdim=True)
        of_dx = terms * rstd * (fp32 * most**2 + 2 * rounded * most)
        of_sums = (dy.abs() * (fp32 * (1 + normal) + rounded)).sum(0), fp32 * dy.abs().sum(0)
        found = []
        if "dsum" in inputs:
            dx = inputs["dsum"].double() + dx
            of_dx = of_dx + gradient.HALF["bf16"] * dx.abs() + 2.0**-130
            found.append(Gradient("dx", outputs["dx"], dx, of_dx))
        found += gradient.quantised(problem, outputs, dx, of_dx)
        for name, exact, allowed in zip(self.sums["m"], sums, of_sums, strict=False):
            found.append(Gradient(name, outputs[name], exact, allowed))
        return found

    def eager(self, problem: Any, inputs: Tensors) -> Callable[[], Any]:
        """Return a call of torch's norm, or of its backward, on the same tensors in BF16."""
        from torch.nn import functional

        wide = peers.widened(inputs, problem.block)
        x, weight = wide("x"), inputs["weight"].bfloat16()
        if problem.mode == "bwd":
            backward = self.torch_backward(x, wide("dy"), weight, inputs)
            return _added(backward, inputs["dsum"]) if problem.residual else backward
        parameters = [inputs[name].bfloat16() for name in self.parameters]
        norm = getattr(functional, self.in_torch)
        return lambda: norm(x, [problem.n], *parameters, problem.eps)


def _added(backward: Callable[[], Any], dsum: torch.Tensor) -> Callable[[], Any]:
    """Return a call of a backward that adds the stream's gradient to its first result."""

    def added() -> Any:
        dx, *sums = backward()
        return dsum + dx, *sums

    return added


def of_stream(
    problem: Any, value: torch.Tensor, noise: torch.Tensor, over: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Return what is expected of a gradient that joins a stream's.

    Args:
        value: the sum of both.
        noise: what fp32's evaluation may add to it.
        over: where it may overflow.

    Returns:
        The values of the codes; per block, what evaluation may add to them; dx and its bounds.
    """
    bound = (noise + bf16_unit(value.abs() + noise) / 2).nan_to_num(0.0, 0.0, 0.0)
    expected = {"dx": value, "dx_bound": bound, "dx_over": over}
    return value.bfloat16().double(), worst(bound, problem.out_block), expected


def forward_bounds(
    block: int, wide: Tensors, mean: torch.Tensor, rstd: torch.Tensor, computed: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return per block fp32's error of (x − mean)·rstd·weight + bias, and where it may overflow.

    Args:
        block: of the codes that are written.
        wide: x, weight and, where there is one, bias.
        computed: the statistics' bounds (`statistics_bounds`); empty where statistics are inputs.
    """
    import torch

    x, weight = wide["x"], wide["weight"].abs()
    mean, rstd = mean[:, None], rstd[:, None]
    size = x.abs() + mean.abs()
    terms = size * rstd * weight
    if "bias" in wide:
        terms = terms + wide["bias"].abs()
    off = NOISE * terms
    if computed:
        of_mean, of_rstd = computed["mean_bound"][:, None], computed["rstd_bound"][:, None]
        off = off + (of_mean * rstd + (x - mean).abs() * of_rstd) * weight
    largest = torch.maximum(terms, torch.maximum(size, size * rstd))
    return worst(off, block), overflows(largest, block, computed.get("row_over"))
