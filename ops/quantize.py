"""Per-block quantisation to INT8: codes, their transpose, or both in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.inplace import refuse_in_place
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, FloatName, Layout, Mode, Problem, Rounding
from jetfire.core.suites import Exported
from jetfire.core.tensors import (
    Quantized,
    Spec,
    Specs,
    Tensors,
    names_of,
    quantized,
    seed_of,
    with_transpose,
)
from jetfire.measure import peers
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_quantize"]


@dataclass(frozen=True)
class QuantizeProblem(Problem):
    """x (m×n, `dtype`) to codes and scales in the given layout."""

    block: Block = 32
    dtype: FloatName = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Quantize(StandardOp):
    name = "quantize"
    summary = "float to per-block INT8, nearest or stochastic"
    Problem = QuantizeProblem
    same_bits_over = "kernels"
    # Each has a default of its own, which is within 5% of the best that was found. A tile tuned
    # for rounding to nearest took up to 1.6 times as long stochastically, and 1.3 transposing
    # (8192×16384, blocks of 32, H200).
    matched = (*StandardOp.matched, "rounding", "layout")

    def reads(self, problem: QuantizeProblem) -> Specs:
        return {"x": Spec(problem.dtype, (problem.m, problem.n))} | seed_of(problem)

    def writes(self, problem: QuantizeProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout=problem.layout)

    def reference(self, problem: QuantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.quantize import quantize

        seed = inputs.get("seed")
        return with_transpose(*quantize(inputs["x"], problem.block, problem.rounding, seed))

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Return every rounding in every layout."""
        return [{"rounding": ["nearest", "stochastic"], "layout": ["q", "qt", "both"]}]

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        return [Exported("triton", problem, ("cubin", "torch", "wheel"), turn=1)]

    def eager(self, problem: QuantizeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same quantisation as plain torch writes it, in the input's own dtype."""
        return lambda: peers.codes(problem, inputs["x"])


OP = Quantize()

_quantize = Operator(
    "quantize(Tensor x, Tensor? seed, int block, str rounding, str layout) -> Tensor[]",
    dtype_field="dtype",
)
_quantize_into = Operator(
    "quantize.into(Tensor x, Tensor? seed, Tensor(a!)? q, Tensor(b!)? scale, Tensor(c!)? qt,"
    " Tensor(d!)? scale_t, int block, str rounding, str layout) -> ()",
    dtype_field="dtype",
)


@checked
def int8_quantize(
    x: Tensor,
    *,
    block: Block = 32,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out: Quantized | None = None,
) -> Quantized:
    """Return the codes and scales of x, m×n bf16, fp16 or fp32.

    Args:
        out: what to write them into, of just this block and layout, and return.
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.choice("block", block, Block)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    if out is None:
        return Quantized.of(_quantize(x, seed, block, rounding, layout), layout, block)
    m, n = x.shape
    codes = expect.room(out, m, n, block, layout, x)
    refuse_in_place(codes, {"x": x, "seed": seed})
    given = (codes.get(part) for part in names_of())
    _quantize_into(x, seed, *given, block, rounding, layout)
    return out
