"""Cross-entropy of a linear head, in BF16 or in INT8.

In BF16 the logits are turned into their gradient where they are. In INT8 the gradient's codes, both
ways, lie beside them: two bytes per logit more at the peak.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from jetfire.core.arguments import checked
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.embedding import TiedGradient
from jetfire.nn.products import (
    FLOATS,
    flat,
    keys_for_backward,
    product_of_transposes,
    unflat,
)
from jetfire.ops import int8_cross_entropy_backward, int8_gemm, int8_quantize
from jetfire.ops.cross_entropy import cross_entropy, cross_entropy_backward


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        valid: int,
        tied: TiedGradient | None,
    ) -> torch.Tensor:
        w = weight.to(x.dtype)
        logits = x @ w.t()
        loss, lse = cross_entropy(logits, targets, valid=valid)
        ctx.save_for_backward(x, w, targets, logits, lse)
        ctx.valid, ctx.weight_dtype, ctx.tied = valid, weight.dtype, tied
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, targets, logits, lse = ctx.saved_tensors
        dlogits = cross_entropy_backward(
            logits, targets, lse, grads[0].contiguous(), valid=ctx.valid, inplace=True
        )
        dx = dlogits @ w if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(dlogits, x, ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        if ctx.tied is not None and dw is not None:
            ctx.tied.put(dw)
            dw = None
        return dx, dw, None, None, None


def _weight_gradient(dlogits: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dlogitsᵀ·x as the weight is stored: on a GPU, if in fp32, straight from fp32 sums."""
    if dlogits.is_cuda and dtype == torch.float32 and dlogits.dtype != dtype:
        return torch.mm(dlogits.t(), x, out_dtype=dtype)
    return (dlogits.t() @ x).to(dtype)


class _Int8LinearCrossEntropy(torch.autograd.Function):
    """The same of codes; those of the gradient in the logits are drawn, and the logits stay.

    `codes` are the tensors of the weight's `Quantized`: autograd looks into no tuple.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        valid: int,
        tied: TiedGradient | None,
        block: Block,
        seed: torch.Tensor | None,
        *codes: torch.Tensor,
    ) -> torch.Tensor:
        w = Quantized.of(codes, "both", block)
        a = int8_quantize(x, block=block, layout="both")
        logits = int8_gemm(a, w, out=FLOATS[x.dtype])
        loss, lse = cross_entropy(logits, targets, valid=valid)
        ctx.save_for_backward(targets, logits, lse, seed, *flat(a.t, w.t))
        ctx.valid, ctx.weight_dtype, ctx.tied, ctx.block = valid, weight.dtype, tied, block
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        targets, logits, lse, seed, *codes = ctx.saved_tensors
        at, wt = unflat(codes, ctx.block)
        g = int8_cross_entropy_backward(
            logits,
            targets,
            lse,
            grads[0].contiguous(),
            block=ctx.block,
            valid=ctx.valid,
            rounding="stochastic",
            layout="both",
            seed=seed,
        )
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = int8_gemm(g, wt, out=FLOATS[logits.dtype])
        if ctx.needs_input_grad[1]:
            dw = product_of_transposes(g.t, at, ctx.weight_dtype)
        if ctx.tied is not None and dw is not None:
            ctx.tied.put(dw)
            dw = None
        return dx, dw, *[None] * 9


@checked
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    valid: int | None = None,
    tied: TiedGradient | None = None,
    codes: Quantized | None = None,
    training: bool = True,
) -> torch.Tensor:
    """Return −log softmax(x·Wᵀ)[target] of every row, in nats, fp32.

    Backward may run once, but with `codes`: it overwrites the logits.

    Args:
        x: rows × width, bf16, fp16 or fp32; the product is of this dtype.
        weight: vocabulary × width, of any float dtype.
        targets: int64, one per row; −100 gives a loss of 0.
        valid: how many of the vocabulary's rows are tokens; the rest is padding.
        tied: takes the weight's gradient, for the `tied_embedding` that x comes from to return.
        codes: the weight's, both ways: multiply in INT8, in blocks of their side.
        training: as a module has it: with `codes`, draw what backward rounds by without gradients
            too, as reentrant checkpointing needs.
    """
    valid = weight.shape[0] if valid is None else valid
    with torch.autocast(x.device.type, enabled=False):
        if codes is not None:
            seed = keys_for_backward(1, x.device, training)
            return _Int8LinearCrossEntropy.apply(
                x, weight, targets, valid, tied, codes.block, seed, *codes.tensors
            )
        return _LinearCrossEntropy.apply(x, weight, targets, valid, tied)
