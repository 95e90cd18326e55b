"""Per-block quantisation to INT8: codes, their transpose, or both in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import (
    Block,
    Check,
    FloatName,
    Layout,
    Mode,
    Op,
    Problem,
    Rounding,
    SameBits,
    Tensors,
    quantised_outputs,
)
from jetfire.core.operators import Operator, dtype_of_first
from jetfire.core.suites import Exported
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_quantize"]


@dataclass(frozen=True)
class QuantizeProblem(Problem):
    """x (m×n, `dtype`) to codes and scales in the given layout."""

    block: Block = 32
    dtype: FloatName = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Quantize(Op):
    name = "quantize"
    summary = "float to per-block INT8, nearest or stochastic"
    Problem = QuantizeProblem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = (model.width, 3 * model.width, model.hidden)
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: QuantizeProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        inputs = {"x": source.floats(problem.m, problem.n, dtype=problem.dtype)}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: QuantizeProblem, inputs: Tensors) -> Tensors:
        device = inputs["x"].device
        return quantised_outputs(problem, device, problem.layout, problem.m, problem.n)

    def reference(self, problem: QuantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.quantize import quantize
        from jetfire.reference.transpose import transpose

        q, scale = quantize(inputs["x"], problem.block, problem.rounding, inputs.get("seed"))
        qt, scale_t = transpose(q, scale)
        return {"q": q, "scale": scale, "qt": qt, "scale_t": scale_t}

    def check(
        self,
        problem: QuantizeProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.every(
            [check.exact(name, out, expected[name]) for name, out in outputs.items()]
        )

    def same_bits(self, problem: QuantizeProblem) -> SameBits:
        return "kernels"

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """All of them."""
        return [{"rounding": ["nearest", "stochastic"], "layout": ["q", "qt", "both"]}]

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        return [Exported("triton", problem, ("cubin", "torch", "wheel"), turn=1)]

    def peers(
        self, problem: QuantizeProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The same quantisation as plain torch writes it, in the input's own dtype."""
        from jetfire.measure import peers

        x = inputs["x"]
        return peers.elementwise(lambda: self.eager(problem, x), self.bytes(problem), x.device)

    def eager(self, problem: QuantizeProblem, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The codes of x by plain torch."""
        import torch

        block = problem.block
        m, n = x.shape
        padded = torch.nn.functional.pad(x, (0, -n % block, 0, -m % block))
        tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = tiles.abs().amax(dim=(1, 3), keepdim=True).float() / 127
        codes = tiles / scale
        if problem.rounding == "stochastic":
            codes = (codes + torch.rand_like(codes)).floor()
        q = codes.round().to(torch.int8).view(padded.shape)[:m, :n]
        scale = scale[:, 0, :, 0]
        outputs = {"q": (q, scale), "qt": (q.t().contiguous(), scale.t().contiguous())}
        if problem.layout == "both":
            return outputs["q"] + outputs["qt"]
        return outputs[problem.layout]


OP = Quantize()

_quantize = Operator(
    "quantize(Tensor x, Tensor? seed, int block, str rounding, str layout) -> Tensor[]",
    derive=dtype_of_first,
)


@checked
def int8_quantize(
    x: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Codes and scales of x, m×n bf16, fp16 or fp32.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.choice("block", block, Block)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(_quantize(x, seed, block, rounding, layout))
