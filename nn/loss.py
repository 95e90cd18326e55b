"""Cross-entropy of a linear head, in BF16 or in INT8, and of a model's own logits.

In BF16 the logits are turned into their gradient where they are. In INT8 the gradient's codes, both
ways, lie beside them, two bytes per logit: of a part of the rows at a time, where there are many.
In parts, forward makes the gradient of a mean loss at once, and no logits are kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jetfire.core.arguments import checked
from jetfire.core.once import once_differentiable
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn import sizes
from jetfire.nn.embedding import TiedGradient
from jetfire.nn.products import FLOATS, flat, keys_for_backward, times_weight, unflat
from jetfire.ops import int8_cross_entropy_backward, int8_gemm, int8_quantize
from jetfire.ops.cross_entropy import cross_entropy, cross_entropy_backward
from jetfire.reference.cross_entropy import IGNORED


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
        return dx, _untied(dw, ctx.weight_dtype, ctx.tied), None, None, None


def _untied(
    dw: torch.Tensor | None, dtype: torch.dtype, tied: TiedGradient | None
) -> torch.Tensor | None:
    """Return a weight's gradient in its dtype; None where the embedding returns it with its own."""
    dw = None if dw is None else dw.to(dtype)
    if tied is None or dw is None:
        return dw
    tied.put(dw)
    return None


def _weight_gradient(dlogits: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dlogitsᵀ·x as the weight is stored: on a GPU, if in fp32, straight from fp32 sums."""
    if dlogits.is_cuda and dtype == torch.float32 and dlogits.dtype != dtype:
        return torch.mm(dlogits.t(), x, out_dtype=dtype)
    return (dlogits.t() @ x).to(dtype)


def _gradient_codes(*tensors: torch.Tensor, **options: Any) -> Quantized:
    """Return the codes of the logits' gradient, both ways, rounded stochastically."""
    options |= {"rounding": "stochastic", "layout": "both"}
    return int8_cross_entropy_backward(*tensors, **options)


class _Int8LinearCrossEntropy(torch.autograd.Function):
    """The loss of codes. The gradient is rounded stochastically, and the logits stay.

    `seeds` has a key for each part of the rows. `codes` are the tensors of the weight's
    `Quantized`: autograd looks into no tuple.
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
        seeds: torch.Tensor | None,
        *codes: torch.Tensor,
    ) -> torch.Tensor:
        w = Quantized.of(codes, "both", block)
        a = int8_quantize(x, block=block, layout="both")
        logits = times_weight(a, w, out=FLOATS[x.dtype])
        loss, lse = cross_entropy(logits, targets, valid=valid)
        ctx.save_for_backward(targets, logits, lse, seeds, *flat(a.t, w.t))
        ctx.valid, ctx.weight_dtype, ctx.tied, ctx.block = valid, weight.dtype, tied, block
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        targets, logits, lse, seeds, *codes = ctx.saved_tensors
        at, wt = unflat(codes, ctx.block)
        _, size = sizes.head_parts(*logits.shape)
        by_row = (t.split(size) for t in (logits, targets, lse, grads[0].contiguous()))
        of_x, scales = at.tensors
        by_column = of_x.split(size, 1), scales.split(size // ctx.block, 1)
        dxs, dw = [], None
        for *part, q, scale, seed in zip(*by_row, *by_column, seeds.split(1), strict=True):
            g = _gradient_codes(*part, block=ctx.block, valid=ctx.valid, seed=seed)
            if ctx.needs_input_grad[0]:
                dxs.append(times_weight(g, wt, out=FLOATS[logits.dtype]))
            if ctx.needs_input_grad[1]:
                dw = int8_gemm(g.t, Quantized(q, scale, block=ctx.block), out="fp32", c=dw)
            del g  # else the next part's codes are made beside them
        dx = torch.cat(dxs) if len(dxs) > 1 else next(iter(dxs), None)
        return dx, _untied(dw, ctx.weight_dtype, ctx.tied), *[None] * 9


class _Int8MeanInParts(torch.autograd.Function):
    """The mean loss of codes. Forward makes its gradient too, of a part of the rows at a time.

    Backward multiplies that gradient by the one that the mean receives. Tensors are those of
    `_Int8LinearCrossEntropy`; `learns` says whether a backward follows.
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
        seeds: torch.Tensor | None,
        learns: bool,
        *codes: torch.Tensor,
    ) -> torch.Tensor:
        w = Quantized.of(codes, "both", block)
        share = (targets != IGNORED).sum().float().reciprocal()
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        dxs: list[torch.Tensor] = []
        dw = None
        parts, size = sizes.head_parts(x.shape[0], weight.shape[0], whole=False)
        for i in range(parts):
            part, its = x[i * size : (i + 1) * size], targets[i * size : (i + 1) * size]
            a = int8_quantize(part, block=block, layout="both" if learns else "q")
            logits = times_weight(a, w, out=FLOATS[x.dtype])
            loss, lse = cross_entropy(logits, its, valid=valid)
            total += loss.sum()
            g = None
            if learns:
                assert seeds is not None
                each = share.expand(its.shape[0]).contiguous()
                seed = seeds[i : i + 1]
                g = _gradient_codes(logits, its, lse, each, block=block, valid=valid, seed=seed)
            del logits  # else the next part's stand beside them
            if g is not None and ctx.needs_input_grad[0]:
                dxs.append(times_weight(g, w.t, out=FLOATS[x.dtype]))
            if g is not None and ctx.needs_input_grad[1]:
                dw = int8_gemm(g.t, a.t, out="fp32", c=dw)
            del g
        ctx.weight_dtype, ctx.tied = weight.dtype, tied
        ctx.save_for_backward(torch.cat(dxs) if dxs else None, dw)
        return total * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = (None if t is None else t * grads[0] for t in ctx.saved_tensors)
        return dx, _untied(dw, ctx.weight_dtype, ctx.tied), *[None] * 10


def mean_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    valid: int,
    tied: TiedGradient | None,
    codes: Quantized,
    training: bool,
) -> torch.Tensor:
    """Return the mean of `linear_cross_entropy` over the targets that count, in nats, fp32.

    Arguments are those of `linear_cross_entropy`. Of the part of the rows that is worked on, each
    logit takes 4 bytes: 2 itself, and 1 for each layout of its gradient's codes. For backward only
    the gradients of x and of the weight are kept.
    """
    with torch.autocast(x.device.type, enabled=False):
        parts, _ = sizes.head_parts(x.shape[0], weight.shape[0], whole=False)
        seeds = keys_for_backward(parts, x.device, training)
        learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        found: torch.Tensor = _Int8MeanInParts.apply(
            x, weight, targets, valid, tied, codes.block, seeds, learns, *codes.tensors
        )
        return found


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
            parts, _ = sizes.head_parts(x.shape[0], weight.shape[0])
            seeds = keys_for_backward(parts, x.device, training)
            return _Int8LinearCrossEntropy.apply(
                x, weight, targets, valid, tied, codes.block, seeds, *codes.tensors
            )
        return _LinearCrossEntropy.apply(x, weight, targets, valid, tied)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return what `transformers`' causal language models call their loss, in nats, an fp32 scalar.

    Sums are fp32, as there, but logits are read, and their gradient is written, in their own dtype:
    neither is made in fp32. Labels that are no token give NaN.

    Args:
        logits: …×tokens×vocabulary, bf16, fp16 or fp32.
        labels: …×tokens; a token's logits are for the label after it.
        num_items_in_batch: divides the sum; None: the number of labels that count.
        ignore_index: the label that does not count.
        shift_labels: the labels as they are for each token, in place of `labels`.
        kwargs: others of the model's, which have no part in it.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    if ignore_index != IGNORED:
        targets = targets.masked_fill(targets == ignore_index, IGNORED)
    loss, _ = cross_entropy(logits.reshape(-1, vocab_size), targets)
    if num_items_in_batch is None:
        return loss.sum() / (targets != IGNORED).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss.sum() / num_items_in_batch
