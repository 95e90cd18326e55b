"""Softmax cross-entropy's gradient as per-block INT8: what a quantised head's products read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, FloatName, Layout, Mode, Rounding
from jetfire.core.tensors import Quantized, Specs, Tensors, quantized, seed_of
from jetfire.measure import peers
from jetfire.measure.bounds import overflows, worst
from jetfire.measure.data import Source
from jetfire.measure.logits import ULP, LogitsOp, LogitsProblem, labelled
from jetfire.measure.op import unrounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["int8_cross_entropy_backward"]

# A probability below it may come as 0: less than 2^-126 does, and a multiplier times dloss is cut
# off at 2^127.
LOST = 2.0**-119
LARGE = 2.0**7  # a probability of 2^120 may overflow before its factor makes it small


@dataclass(frozen=True)
class QuantizeDlogitsProblem(LogitsProblem):
    """logits (m×n, `dtype`), targets, lse and dloss to the codes of the loss's gradient.

    Columns from `valid` on (if there are any) are padding: their gradient is 0.
    """

    block: Block = 32
    dtype: FloatName = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    valid: int | None = None


class QuantizeDlogits(LogitsOp):
    """The gradient is quantised as it is in fp32: no rounding to the logits' dtype in between."""

    name = "quantize_dlogits"
    summary = "softmax cross-entropy's gradient, float in and INT8 out"
    Problem = QuantizeDlogitsProblem
    untuned = True
    # As `quantize` has them.
    matched = (*LogitsOp.matched, "rounding", "layout")

    def settings(self, mode: Mode) -> list[dict[str, list[str]]]:
        """Return every rounding, of the codes alone and with their transpose."""
        return [{"rounding": ["nearest", "stochastic"], "layout": ["q", "both"]}]

    def reads(self, problem: QuantizeDlogitsProblem) -> Specs:
        return super().reads(problem) | seed_of(problem)

    def writes(self, problem: QuantizeDlogitsProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout=problem.layout)

    def inputs(
        self,
        problem: QuantizeDlogitsProblem,
        device: torch.device,
        seed: int = 0,
        data: str = "normal",
    ) -> Tensors:
        """Return those of the loss's gradient, and a seed."""
        inputs = super().inputs(problem, device, seed, data)
        if problem.rounding == "stochastic":
            inputs["seed"] = Source(data, device, seed).seed()
        return inputs

    def reference(self, problem: QuantizeDlogitsProblem, inputs: Tensors) -> Tensors:
        """Return the gradient in float64, and bounds on what evaluation in fp32 may add.

        p is off by a few `ULP`·(1 + |x − lse|) of itself, p − 1 of the target by one more.
        """
        import torch

        from jetfire.reference.cross_entropy import IGNORED, backward
        from jetfire.reference.quantize_dlogits import terms

        logits, targets, lse = (inputs[name] for name in ("logits", "targets", "lse"))
        size = inputs["dloss"].double().abs().masked_fill(targets == IGNORED, 0.0)
        pad = (0, problem.n - problem.columns)
        p, exponent, hot = terms(logits, targets, lse, problem.columns)
        noise = ULP * (4 * p * (1 + exponent.nan_to_num(0.0)) + hot) + LOST
        noise = (noise * size[:, None]).nan_to_num(0.0, 0.0, 0.0)
        # An infinite logit's is no overflow: there all agree that the block is no number.
        most = p.masked_fill(p.isinf(), 0.0) * size.clamp(min=LARGE)[:, None]
        return unrounded(
            problem,
            inputs,
            backward(logits, targets, lse, inputs["dloss"], problem.columns),
            worst(torch.nn.functional.pad(noise, pad), problem.block),
            overflows(torch.nn.functional.pad(most, pad), problem.block),
        )

    def eager(self, problem: QuantizeDlogitsProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return torch's own gradient in the logits' dtype, and plain torch's codes of it."""
        gradient = super().eager(problem, inputs)
        return lambda: peers.codes(problem, gradient())


OP = QuantizeDlogits()

_quantize_dlogits = Operator(
    "quantize_dlogits(Tensor logits, Tensor targets, Tensor lse, Tensor dloss, Tensor? seed, int"
    " block, SymInt? valid, str rounding, str layout) -> Tensor[]",
    dtype_field="dtype",
)


@checked
def int8_cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    *,
    block: Block = 32,
    valid: int | None = None,
    rounding: Rounding = "nearest",
    layout: Layout = "q",
    seed: Tensor | None = None,
) -> Quantized:
    """Return the codes of dloss·(softmax(logits) − one-hot(target)), m×n; 0 in the padding.

    The gradient is quantised in fp32: it is not rounded to the logits' dtype first.

    Args:
        logits, targets, valid: as in `cross_entropy`. A row whose target is no column makes its
            blocks' scales NaN.
        lse: from `cross_entropy`.
        dloss: fp32, m.
    """
    labelled(logits, targets, valid)
    m = logits.shape[0]
    lse, dloss = expect.vector("lse", lse, m, logits), expect.vector("dloss", dloss, m, logits)
    expect.choice("block", block, Block)
    seed = expect.rounding_seed(rounding, seed, layout, logits)
    operands = (logits, targets.contiguous(), lse, dloss, seed)
    return Quantized.of(_quantize_dlogits(*operands, block, valid, rounding, layout), layout, block)
