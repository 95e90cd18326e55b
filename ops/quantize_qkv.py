"""Per-block quantisation of three matrices side by side: attention's gradients, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import Block, Layout, Mode, Op, Rounding, Tensors, quantised_outputs
from jetfire.core.errors import UsageError
from jetfire.core.operators import Operator, dtype_of_first
from jetfire.core.suites import Exported
from jetfire.ops.quantize import Quantize, QuantizeProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model
    from jetfire.measure.data import Source

__all__ = ["int8_quantize_qkv"]


PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class QuantizeQkvProblem(QuantizeProblem):
    """query, key and value (each m×n, `dtype`) to the codes of the m×3n matrix of all three."""


class QuantizeQkv(Quantize):
    name = "quantize_qkv"
    summary = "three floats side by side to per-block INT8: the gradient of a QKV product"
    Problem = QuantizeQkvProblem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def inputs(
        self, problem: QuantizeProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        from jetfire.measure.data import Source

        def part(source: Source) -> torch.Tensor:
            return source.floats(problem.m, problem.n, dtype=problem.dtype)

        inputs = {name: part(Source(data, device, seed + i)) for i, name in enumerate(PARTS)}
        if problem.rounding == "stochastic":
            inputs["seed"] = Source(data, device, seed).seed()
        return inputs

    def outputs(self, problem: QuantizeProblem, inputs: Tensors) -> Tensors:
        device, columns = inputs["query"].device, len(PARTS) * problem.n
        return quantised_outputs(problem, device, problem.layout, problem.m, columns)

    def reference(self, problem: QuantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.quantize_qkv import quantize_qkv
        from jetfire.reference.transpose import transpose

        query, key, value = (inputs[name] for name in PARTS)
        q, scale = quantize_qkv(
            query, key, value, problem.block, problem.rounding, inputs.get("seed")
        )
        qt, scale_t = transpose(q, scale)
        return {"q": q, "scale": scale, "qt": qt, "scale_t": scale_t}

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """As of ops in general: `quantize` shows the rest."""
        return Op.settings(self, mode)

    def exported(self) -> list[Exported]:
        return []

    def peers(
        self, problem: QuantizeProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """Those of `quantize`, after the copy that puts the three side by side."""
        import torch

        from jetfire.measure import peers

        def eager() -> Any:
            x = torch.cat([inputs[name] for name in PARTS], dim=1)
            return self.eager(problem, x)

        return peers.elementwise(eager, self.bytes(problem), inputs["query"].device)


OP = QuantizeQkv()

_quantize_qkv = Operator(
    "quantize_qkv(Tensor query, Tensor key, Tensor value, Tensor? seed, int block, str"
    " rounding, str layout) -> Tensor[]",
    derive=dtype_of_first,
)


@checked
def int8_quantize_qkv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Codes and scales of [query | key | value], m×3w, of three m×w matrices of one float dtype.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    expect.matrix("query", query, expect.FLOATS)
    for name, x in (("key", key), ("value", value)):
        expect.matrix(name, x, (expect.named(query.dtype),))
        expect.same_device(name, x, query)
        if x.shape != query.shape:
            raise UsageError(f"{name} has shape {tuple(x.shape)}: expected {tuple(query.shape)}")
    expect.choice("block", block, Block)
    seed = expect.rounding_seed(rounding, seed, layout, query)
    return tuple(_quantize_qkv(query, key, value, seed, block, rounding, layout))
