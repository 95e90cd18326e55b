"""The block of `jetfire-train`'s GPT-2 with products of 4-bit codes and INT8 between them.

The residual stream is BF16, as are the inputs and outputs of products. Norms, GELU and adds read
and write INT8 codes in blocks of one side, `flow`, and so does what backward keeps of them.

What backward keeps of a product's input is its 4-bit codes (`jetfire.nn.int4`), which are half of
GELU's input's, so its output is not made again. A product's gradient of its input becomes codes by
stochastic rounding, with a key of its own, so that it stays right in the mean; and so does what
attention keeps (`jetfire.nn.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jetfire.core.arguments import checked
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn import attention
from jetfire.nn.block import GPT2StreamBlock
from jetfire.nn.flow import Stream, checked_stream
from jetfire.nn.int4 import (
    KEYS,
    Int4Kept,
    Int4Linear,
    Int4Product,
    multiplied,
    multiply,
    multiply_backward,
    sampled,
)
from jetfire.nn.products import Placed, checked_block, keys_for_backward, quantised_gradient
from jetfire.nn.recipes import DEFAULT, Int4
from jetfire.ops import (
    int8_add,
    int8_dequantize,
    int8_dropout,
    int8_dropout_backward,
    int8_gelu,
    int8_gelu_backward,
    int8_layernorm,
    int8_layernorm_add_backward,
    int8_quantize,
)

Tensor = torch.Tensor
# Keys that a function draws beside its product's: of the codes of a gradient, and of what a norm or
# GELU makes of it; or of a mask, and of the codes of the gradient that it is laid on.
_OWN = 2
# Those of a block, in the order of its forward.
_KEYS = (_OWN, KEYS, attention.KEYS, KEYS, _OWN, _OWN, KEYS, _OWN, KEYS, _OWN)


class _Flow(NamedTuple):
    """What the functions know besides their tensors.

    Attributes:
        side: of the codes' blocks.
        eps: of both norms.
        dropout: probability, of both branches' outputs.
    """

    side: Block
    eps: float
    dropout: float


def _normed(
    s: Quantized, norm: Sequence[Tensor], mean: Tensor | None, rstd: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a LayerNorm's output, bf16, and the statistics of its rows.

    Args:
        norm: its weight and bias.
        mean, rstd: the statistics where they are known.
    """
    h, mean, rstd = int8_layernorm(s, *norm, mean=mean, rstd=rstd, eps=eps)
    return int8_dequantize(h), mean, rstd


def _activated(f: Quantized) -> Tensor:
    """Return GELU of FC1's output, bf16."""
    return int8_dequantize(int8_gelu(f))


class _NormedProduct(torch.autograd.Function):
    """LayerNorm → product. The stream passes through, so that backward adds to it in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        flow: _Flow,
        seeds: Tensor | None,
        x: Tensor,
        q: Tensor,
        scale: Tensor,
        mean: Tensor | None,
        rstd: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        *by: Any,
    ) -> tuple[Tensor, Tensor]:
        product, s = Int4Product(*by), Quantized(q, scale, block=flow.side)
        h, mean, rstd = _normed(s, (weight, bias), mean, rstd, flow.eps)
        y, kept = multiply(h, product)
        if kept is not None:
            ctx.save_for_backward(seeds, q, scale, mean, rstd, weight, *kept)
        ctx.flow, ctx.setting = flow, product.setting
        return x.view_as(x), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dy = grads
        seeds, q, scale, mean, rstd, weight, *kept = ctx.saved_tensors
        dh, *of_product = _product_backward(ctx, dy, kept, seeds[0:1])
        s = Quantized(q, scale, block=ctx.flow.side)
        dx, _, dweight, dbias = int8_layernorm_add_backward(
            s, dh, weight, mean, rstd, dx.contiguous(), seed=seeds[1:2]
        )
        return *[None] * 2, dx, *[None] * 4, dweight, dbias, *of_product


class _ActivatedProduct(torch.autograd.Function):
    """GELU of codes → product. The codes' gradient is that of what was quantised."""

    @staticmethod
    def forward(ctx: Any, flow: _Flow, seeds: Tensor | None, f: Tensor, *by: Any) -> Tensor:
        product, codes = Int4Product(*by), int8_quantize(f, block=flow.side)
        y, kept = multiply(_activated(codes), product)
        if kept is not None:
            ctx.save_for_backward(seeds, codes.q, codes.scale, *kept)
        ctx.flow, ctx.setting = flow, product.setting
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seeds, q, scale, *kept = ctx.saved_tensors
        du, *of_product = _product_backward(ctx, grads[0], kept, seeds[0:1])
        f = Quantized(q, scale, block=ctx.flow.side)
        df = int8_dequantize(int8_gelu_backward(f, du, seed=seeds[1:2]))
        return *[None] * 2, df, *of_product


def _product_backward(ctx: Any, dy: Tensor, kept: Sequence[Tensor], seed: Tensor) -> Any:
    """Return the codes of the gradient of a product's input, and those of the product's fields."""
    wants = Int4Product(*ctx.needs_input_grad[-len(Int4Product._fields) :])
    dx, *others = multiply_backward(dy, Int4Kept(*kept), ctx.setting, True, wants)
    assert dx is not None
    return quantised_gradient(dx, ctx.flow.side, seed, "q"), *others


class _Added(torch.autograd.Function):
    """The stream plus a branch's output after dropout, its codes and its rows' statistics."""

    @staticmethod
    def forward(
        ctx: Any, flow: _Flow, seeds: Tensor | None, x: Tensor, y: Tensor
    ) -> tuple[Tensor, ...]:
        branch = int8_quantize(y, block=flow.side)
        if flow.dropout:
            assert seeds is not None
            branch = int8_dropout(branch, seeds[0:1], p=flow.dropout)
        total, codes, *statistics = int8_add(x, branch, eps=flow.eps)
        ctx.mark_non_differentiable(*codes.tensors, *statistics)
        if not torch.compiler.is_compiling():  # Dynamo traces no such call
            # Autograd would fill zeros for the codes' gradient: a byte per element.
            ctx.set_materialize_grads(False)
        ctx.flow = flow
        ctx.save_for_backward(seeds)
        return total, *codes.tensors, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (seeds,), flow, dx = ctx.saved_tensors, ctx.flow, grads[0]
        dy = dx
        if flow.dropout and dx is not None:
            codes = quantised_gradient(dx, flow.side, seeds[1:2], "q")
            dy = int8_dequantize(int8_dropout_backward(codes, seeds[0:1], p=flow.dropout))
        return None, None, dx, dy


# torch.compile traces the operators that these call and not their Python.
@torch.compiler.allow_in_graph
def _normed_product(*args: Any) -> Any:
    return _NormedProduct.apply(*args)


@torch.compiler.allow_in_graph
def _activated_product(*args: Any) -> Any:
    return _ActivatedProduct.apply(*args)


@torch.compiler.allow_in_graph
def _added(*args: Any) -> Any:
    return _Added.apply(*args)


class Int4Block(GPT2StreamBlock):
    """LayerNorm → attention → add; LayerNorm → MLP (tanh GELU) → add, with products in 4 bits.

    Attention itself is `scaled_dot_product_attention` in BF16. Parameters are fp32, under the names
    norm1, qkv, projection, norm2, expand and contract, and of the last four as `Int4Linear` has
    them.

    Args:
        width: of the stream, a multiple of heads.
        dropout: probability, of attention's weights and of both branches' outputs.
        int4: as of `Int4Linear`.
        flow: 32, 64 or 128, the side of the blocks of what flows between products.
    """

    qkv: Int4Linear
    projection: Int4Linear
    expand: Int4Linear
    contract: Int4Linear

    @checked
    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        int4: Int4 = DEFAULT,
        flow: int = 32,
        device: Placed = None,
    ) -> None:
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}
        linear = partial(Int4Linear, int4=int4, **fp32)
        super().__init__(width, heads, dropout, checked_block(flow, "flow"), linear, fp32)
        self.int4 = int4

    def forward(self, stream: Stream, batch: int) -> Stream:
        """Return the stream of batch·length tokens × width after this block."""
        checked_stream(stream, self.flow, batch)
        flow = _Flow(self.flow, self.norm1.eps, self.dropout if self.training else 0.0)
        # The steps of all four products see the same rows.
        sample = sampled(stream.x.detach(), self.int4.gradient, self.training)
        seeds = keys_for_backward(sum(_KEYS), stream.x.device, self.training)
        keys = iter([None] * len(_KEYS) if seeds is None else seeds.split(_KEYS))

        def normed(stream: Stream, norm: nn.LayerNorm, layer: Int4Linear) -> Any:
            """Return the stream, which passes through, and the product of its norm."""
            _, s, mean, rstd, _ = stream
            own, both = next(keys), (norm.weight, norm.bias)
            first = partial(_normed, s, both, mean, rstd, flow.eps)
            by = layer.product(lambda: first()[0].detach(), sample, next(keys))
            return _normed_product(flow, own, stream.x, *s[:2], mean, rstd, *both, *by)

        def added(x: Tensor, y: Tensor) -> Stream:
            x, *codes, mean, rstd = _added(flow, next(keys), x, y)
            return Stream(x, Quantized.of(codes, "q", self.flow), mean, rstd)

        x, qkv = normed(stream, self.norm1, self.qkv)

        def attend(*parts: Tensor) -> Tensor:
            return self.attended(parts, batch, flow.dropout)

        own = next(keys)
        kept = attend if own is None else attention.keeps_codes(attend, self.flow, own)
        attended = kept(*qkv.split(self.width, dim=1)).reshape(x.shape)
        del qkv  # of which attention may keep codes
        by = self.projection.product(attended.detach, sample, next(keys))
        stream = added(x, multiplied(attended, by))
        del attended
        x, f = normed(stream, self.norm2, self.expand)
        own = next(keys)
        by = self.contract.product(
            lambda: _activated(int8_quantize(f.detach(), block=self.flow)), sample, next(keys)
        )
        return added(x, _activated_product(flow, own, f, *by))

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, flow={self.flow}"
