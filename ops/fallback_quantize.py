"""Per-block quantisation to INT8 with fallback: blocks with outliers have two planes of codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, FloatName, Layout, Problem
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, quantized, with_transpose
from jetfire.measure import peers
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_fallback_quantize"]


@dataclass(frozen=True)
class FallbackQuantizeProblem(Problem):
    """x (m×n, `dtype`) to codes and scales, and to those of what they miss, in the given layout.

    The second, ``r`` and ``r_scale``, are 0 but in blocks that fall back: those whose largest
    magnitude is above the threshold.
    """

    block: Block = 128
    dtype: FloatName = "bf16"
    layout: Layout = "q"


class FallbackQuantize(StandardOp):
    name = "fallback_quantize"
    summary = "float to per-block INT8, blocks with outliers in two planes of codes"
    Problem = FallbackQuantizeProblem
    same_bits_over = "kernels"
    matched = (*StandardOp.matched, "layout")
    untuned = True

    def reads(self, problem: FallbackQuantizeProblem) -> Specs:
        return {
            "x": Spec(problem.dtype, (problem.m, problem.n)),
            "threshold": Spec("fp32", (1,)),
        }

    def writes(self, problem: FallbackQuantizeProblem) -> Specs:
        sizes = problem.m, problem.n, problem.block
        return quantized(*sizes, "q", problem.layout) | quantized(*sizes, "r", problem.layout)

    def drawn(self, problem: FallbackQuantizeProblem, source: Source) -> Tensors:
        """Draw x, and the threshold above which a fifth of its blocks are."""
        from jetfire.reference.fallback_quantize import threshold_of

        x = source.floats(problem.m, problem.n, dtype=problem.dtype)
        return {"x": x, "threshold": threshold_of(x, problem.block, 20)}

    def edges(self, problem: FallbackQuantizeProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Have all blocks fall back, or none."""
        from jetfire.measure import edges

        ends = 0.0, -1.0, 2.0**-100, math.inf, math.nan
        return {"threshold": edges.throughout(rng, ends, inputs["threshold"])}

    def reference(self, problem: FallbackQuantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.fallback_quantize import fallback_quantize

        q, scale, r, r_scale = fallback_quantize(inputs["x"], problem.block, inputs["threshold"])
        return with_transpose(q, scale) | with_transpose(r, r_scale, "r")

    def eager(self, problem: FallbackQuantizeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return plain torch's codes, and those of what they miss."""
        import torch

        from jetfire.reference.quantize import spread

        x, threshold, block = inputs["x"], inputs["threshold"], problem.block

        def run() -> tuple[Tensor, ...]:
            first = peers.codes(problem, x)
            q, scale = (part.t() for part in first) if problem.layout == "qt" else first[:2]
            falls = spread(127 * scale > threshold, block, *x.shape)
            missed = torch.where(falls, x - q * spread(scale, block, *x.shape), 0.0)
            return *first, *peers.codes(problem, missed)

        return run


OP = FallbackQuantize()

_fallback_quantize = Operator(
    "fallback_quantize(Tensor x, Tensor threshold, int block, str layout) -> Tensor[]",
    dtype_field="dtype",
)


@checked
def int8_fallback_quantize(
    x: Tensor, threshold: Tensor, *, block: Block = 128, layout: Layout = "q"
) -> tuple[Quantized, Quantized]:
    """Return x, m×n bf16, fp16 or fp32, as the sum of two quantised matrices.

    Args:
        threshold: fp32, one element. A block with a larger magnitude falls back: what its codes
            miss has codes and a scale in the second matrix, which is 0 in all other blocks.
        layout: of both.
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.scalar("threshold", threshold, x)
    expect.choice("block", block, Block)
    expect.choice("layout", layout, Layout)
    codes = _fallback_quantize(x, threshold, block, layout)
    half = len(codes) // 2
    first, second = (Quantized.of(part, layout, block) for part in (codes[:half], codes[half:]))
    return first, second
