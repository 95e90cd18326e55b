"""LayerNorm and its gradient on quantised tensors, statistics and reductions over whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.ops.data import Source
from jetfire.ops.op import (
    Block,
    Check,
    Layout,
    Mode,
    Op,
    Problem,
    Rounding,
    SameBits,
    Tensors,
    quantised_outputs,
)

if TYPE_CHECKING:
    import torch

    from jetfire.ops.workloads import Model

# A few roundings of fp32: what evaluation may add to a result, in units of its largest term.
NOISE = 8 * 2.0**-24


@dataclass(frozen=True)
class LayerNormProblem(Problem):
    """fwd: x (m×n) to x̂·weight + bias; bwd: x, dy and x's statistics to dx, dweight, dbias.

    x, dy, y and dx are quantised per block. ``stats="given"``: forward takes ``mean`` and ``rstd``
    (from `add`); ``"row"``: it computes and returns them. Backward always takes them.
    """

    block: Block = 32
    mode: Mode = "fwd"
    stats: Literal["row", "given"] = "row"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    eps: float = 1e-5


class LayerNorm(Op):
    name = "layernorm"
    summary = "LayerNorm and its gradient, INT8 in and out, statistics of whole rows"
    Problem = LayerNormProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def problems(self, mode: Mode, fields: Mapping[str, Any]) -> list[Any]:
        """Gradients are rounded stochastically unless the caller says otherwise."""
        rounding = {"rounding": "stochastic"} if mode == "bwd" else {}
        return super().problems(mode, {**rounding, **fields})

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
                mean, rstd = (torch.empty(m, device=device) for _ in range(2))
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
            outputs |= {name: torch.empty(n, device=device) for name in ("dweight", "dbias")}
        elif problem.stats == "row":
            outputs |= {name: torch.empty(m, device=device) for name in ("mean", "rstd")}
        return outputs

    def reference(self, problem: LayerNormProblem, inputs: Tensors) -> Tensors:
        """Values in float64, and bounds on what fp32 evaluation may add where terms cancel."""
        from jetfire.reference.philox import random_u16
        from jetfire.reference.quantize import scales

        backward = problem.mode == "bwd"
        expected = _backward(problem, inputs) if backward else _forward(problem, inputs)
        expected["scale"] = scales(expected["value"].float(), problem.block)[0]
        if problem.rounding == "stochastic":
            expected["u"] = random_u16(inputs["seed"], problem.m, problem.n).float() / 65536
        return expected

    def check(
        self,
        problem: LayerNormProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Codes that the exact values allow; statistics to 1e-5; column sums to 1e-5 of Σ|term|."""
        from jetfire.ops import check

        checks = [
            check.quantised(
                outputs, expected["value"], expected["scale"], problem.block, expected.get("u"),
                noise=expected["noise"],
            )
        ]  # fmt: skip
        if "rstd" in outputs:
            checks.append(check.floats("rstd", outputs["rstd"], expected["rstd"], 1e-5))
        for name in ("mean", "dweight", "dbias"):
            if name in outputs:
                bound = expected[f"{name}_bound"]
                checks.append(check.bounded(name, outputs[name], expected[name], bound))
        return check.every(checks)

    def same_bits(self, problem: LayerNormProblem) -> SameBits:
        return "configs" if problem.mode == "fwd" and problem.stats == "given" else "runs"

    def peers(
        self, problem: LayerNormProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """torch's LayerNorm, or its three gradients, of the same BF16 tensors."""
        import torch

        from jetfire.ops import peers
        from jetfire.reference.dequantize import dequantize

        def wide(name: str) -> torch.Tensor:
            return dequantize(inputs[name], inputs[f"{name}_scale"], problem.block, torch.bfloat16)

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


def _noise(terms: torch.Tensor, block: int) -> torch.Tensor:
    """`NOISE` times the largest term of every block; 0 where that is NaN or Inf."""
    from jetfire.reference.quantize import block_amax

    return NOISE * block_amax(terms, block).nan_to_num(0.0, 0.0, 0.0)


def _forward(problem: LayerNormProblem, inputs: Tensors) -> Tensors:
    import torch

    from jetfire.reference import layernorm
    from jetfire.reference.dequantize import dequantize

    x = dequantize(inputs["x"], inputs["x_scale"], problem.block, torch.float64)
    weight, bias = inputs["weight"].double(), inputs["bias"].double()
    if problem.stats == "given":
        mean, rstd = inputs["mean"].double(), inputs["rstd"].double()
    else:
        mean, rstd = layernorm.statistics(x, problem.eps)
    value = layernorm.forward(x, mean, rstd, weight, bias)
    terms = (x.abs() + mean.abs()[:, None]) * rstd[:, None] * weight.abs() + bias.abs()
    bound = (1e-6 * x.abs().mean(dim=1)).nan_to_num(0.0)
    return {
        "value": value, "noise": _noise(terms, problem.block),
        "mean": mean, "rstd": rstd, "mean_bound": bound,
    }  # fmt: skip


def _backward(problem: LayerNormProblem, inputs: Tensors) -> Tensors:
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
    return {
        "value": value, "noise": _noise((g + rows) * rstd[:, None], problem.block),
        "dweight": dweight, "dweight_bound": 1e-5 * (dy.abs() * xhat).sum(dim=0).nan_to_num(0.0),
        "dbias": dbias, "dbias_bound": 1e-5 * dy.abs().sum(dim=0).nan_to_num(0.0),
    }  # fmt: skip


OP = LayerNorm()
