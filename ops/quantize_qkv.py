"""Per-block quantisation of three matrices side by side: attention's gradients, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, FloatName, Layout, Problem, Rounding
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, quantized, seed_of, with_transpose
from jetfire.measure import peers
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_quantize_qkv"]

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class QuantizeQkvProblem(Problem):
    """query, key and value (each m×n, `dtype`) to the codes of the m×3n matrix of all three."""

    block: Block = 32
    dtype: FloatName = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class QuantizeQkv(StandardOp):
    name = "quantize_qkv"
    summary = "three floats side by side to per-block INT8: the gradient of a QKV product"
    Problem = QuantizeQkvProblem
    same_bits_over = "kernels"

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def reads(self, problem: QuantizeQkvProblem) -> Specs:
        part = Spec(problem.dtype, (problem.m, problem.n))
        return dict.fromkeys(PARTS, part) | seed_of(problem)

    def writes(self, problem: QuantizeQkvProblem) -> Specs:
        columns = len(PARTS) * problem.n
        return quantized(problem.m, columns, problem.block, layout=problem.layout)

    def reference(self, problem: QuantizeQkvProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.quantize_qkv import quantize_qkv

        query, key, value = (inputs[name] for name in PARTS)
        seed = inputs.get("seed")
        codes = quantize_qkv(query, key, value, problem.block, problem.rounding, seed)
        return with_transpose(*codes)

    def eager(self, problem: QuantizeQkvProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return plain torch's codes, after the copy that puts the three side by side."""
        import torch

        parts = [inputs[name] for name in PARTS]
        return lambda: peers.codes(problem, torch.cat(parts, dim=1))


OP = QuantizeQkv()

_quantize_qkv = Operator(
    "quantize_qkv(Tensor query, Tensor key, Tensor value, Tensor? seed, int block, str"
    " rounding, str layout) -> Tensor[]",
    dtype_field="dtype",
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
) -> Quantized:
    """Return the codes of [query | key | value], m×3w, of three m×w matrices of one float dtype."""
    expect.matrix("query", query, expect.FLOATS)
    for name, x in (("key", key), ("value", value)):
        expect.same_shape(name, x, query, expect.named(query.dtype))
    expect.choice("block", block, Block)
    seed = expect.rounding_seed(rounding, seed, layout, query)
    codes = _quantize_qkv(query, key, value, seed, block, rounding, layout)
    return Quantized.of(codes, layout, block)
