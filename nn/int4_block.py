"""The block of `jetfire-train`'s GPT-2 with products of 4-bit codes and INT8 between them.

The residual stream is BF16, as is what attention reads and writes. Norms, GELU and adds read and
write INT8 codes in blocks of one side, `flow`, as do products: each makes its own 4-bit codes of
them. Backward, what attention and GELU give their products are codes too.

Backward keeps those 4-bit codes of a product's input (`jetfire.nn.int4`), and INT8 ones of what
norms, GELU and attention read (`jetfire.nn.attention`); but GELU's output, the widest input, is
made again. What becomes codes for a gradient is rounded stochastically, each time with a key of its
own, so that it stays right in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core.arguments import checked
from jetfire.core.once import once_differentiable
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn import attention
from jetfire.nn.block import GPT2StreamBlock
from jetfire.nn.flow import Stream, checked_stream, side_by_side
from jetfire.nn.int4 import (
    Int4Kept,
    Int4Linear,
    Int4Product,
    Int4Setting,
    keep,
    multiply,
    multiply_alone,
    multiply_backward,
)
from jetfire.nn.int4_gradient import KEYS, Rounded, checked_tokens
from jetfire.nn.products import (
    Handoff,
    Placed,
    checked_block,
    keys_for_backward,
    quantised_gradient,
)
from jetfire.nn.recipes import DEFAULT, GRADIENT_BLOCK, Int4
from jetfire.ops import (
    int8_add,
    int8_dequantize,
    int8_dropout,
    int8_dropout_backward,
    int8_gelu,
    int8_gelu_backward,
    int8_layernorm,
    int8_layernorm_add_backward,
)

Tensor = torch.Tensor
# Keys of a block, in the order of its forward. Beside its products' own the first half draws those
# of attention's gradients, of the norm's output's as codes, and of what the norm makes of it; the
# second those of GELU's output's, of what GELU makes of it, and the norm's two. An add draws those
# of a mask, and of the codes of the gradient that it is laid on.
_KEYS = (3, KEYS, attention.KEYS, KEYS, 2, 4, KEYS, KEYS, 2)


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


class _Norm(NamedTuple):
    """A LayerNorm and what it reads, in the order in which autograd is given it.

    Attributes:
        q, scale: codes of the stream.
        mean, rstd: the statistics of its rows where they are known.
    """

    q: Tensor
    scale: Tensor
    mean: Tensor | None
    rstd: Tensor | None
    weight: Tensor
    bias: Tensor

    def normed(self, flow: _Flow) -> tuple[Quantized, _Norm]:
        """Return the output, and the same with statistics."""
        s, parameters = Quantized(self.q, self.scale, block=flow.side), (self.weight, self.bias)
        more: dict[str, Any] = {"mean": self.mean, "rstd": self.rstd, "eps": flow.eps}
        h, mean, rstd = int8_layernorm(s, *parameters, **more)
        return h, self._replace(mean=mean, rstd=rstd)

    def backward(
        self,
        dh: Quantized,
        dx: Tensor,
        flow: _Flow,
        seed: Tensor,
        before: Handoff | None,
        setting: Int4Setting,
    ) -> tuple[Tensor | None, ...]:
        """Return the stream's gradient through the norm and past it, and those of its fields.

        Args:
            dh: of its output; dx: of the stream past it.
            before: has the codes of the stream's gradient; None if nobody takes them.
            setting: says how these lie.
        """
        assert self.mean is not None
        assert self.rstd is not None
        s = Quantized(self.q, self.scale, block=flow.side)
        rows = self.weight, self.mean, self.rstd
        more: dict[str, Any] = {}
        if before is not None:
            more = {"layout": setting.layout, "out_block": setting.block(flow.side)}
        dx, codes, dweight, dbias = int8_layernorm_add_backward(
            s, dh, *rows, dx.contiguous(), seed=seed, **more
        )
        if before is not None:
            before.put(dx, codes)
        return dx, *[None] * 4, dweight, dbias


_NORM, _PRODUCT, _KEPT = (len(kind._fields) for kind in (_Norm, Int4Product, Int4Kept))


class _Enter(torch.autograd.Function):
    """LayerNorm → query, key and value, each a matrix of tokens × width.

    The stream passes through, so that backward adds to it in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, flow: _Flow, before: Handoff | None, seeds: Tensor | None, x: Tensor, *given: Any
    ) -> tuple[Tensor, ...]:
        product = Int4Product(*given[_NORM:])
        h, norm = _Norm(*given[:_NORM]).normed(flow)
        y, kept = multiply(h, product)
        if kept is not None:
            ctx.save_for_backward(seeds, *norm, *kept)
        ctx.flow, ctx.before, ctx.setting = flow, before, product.setting
        return x.view_as(x), *y.chunk(3, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dx, *parts), flow = grads, ctx.flow
        seeds, *saved = ctx.saved_tensors
        norm, kept = _Norm(*saved[:_NORM]), Int4Kept(*saved[_NORM:])
        setting = ctx.setting
        dy = side_by_side(parts, setting.block(flow.side), seeds[0:1], setting.layout)
        wants = Int4Product(*ctx.needs_input_grad[-_PRODUCT:])
        rounded = Rounded(flow.side, seeds[1:2])
        dh, *of_product = multiply_backward(dy, kept, setting, True, wants, rounded)
        of_norm = norm.backward(dh, dx, flow, seeds[2:3], ctx.before, setting)
        return None, None, None, *of_norm, *of_product


def _added(
    ctx: Any, flow: _Flow, seeds: Tensor | None, x: Tensor, branch: Quantized
) -> tuple[Tensor, ...]:
    """Return the stream plus a branch's output after dropout, its codes and its rows' statistics.

    Args:
        ctx: autograd's, of a function that returns that.
    """
    if flow.dropout:
        assert seeds is not None
        branch = int8_dropout(branch, seeds[0:1], p=flow.dropout)
    total, codes, *statistics = int8_add(x, branch, eps=flow.eps)
    ctx.mark_non_differentiable(*codes.tensors, *statistics)
    if not torch.compiler.is_compiling():  # Dynamo traces no such call
        # Autograd would fill zeros for the codes' gradient: a byte per element.
        ctx.set_materialize_grads(False)
    return total, *codes.tensors, *statistics


def _of_branch(
    dx: Tensor, flow: _Flow, handoff: Handoff | None, seeds: Tensor, setting: Int4Setting
) -> Tensor | Quantized:
    """Return the gradient of a branch's output before dropout, from that of the stream.

    Args:
        handoff: may have the codes of dx.
        setting: of the product whose output it is.
    """
    block = GRADIENT_BLOCK if setting.gradient == "int8" else None  # parts are made of any
    g = None if handoff is None else handoff.take(dx, setting.layout, block)
    if not flow.dropout:
        return dx if g is None else g
    if g is None:
        g = quantised_gradient(dx, setting.block(flow.side), seeds[1:2], "q")
    return int8_dropout_backward(g, seeds[0:1], p=flow.dropout, layout=setting.layout)


class _Projected(torch.autograd.Function):
    """Attention's projection, and the stream with that added, as `_added` returns it."""

    @staticmethod
    def forward(
        ctx: Any,
        flow: _Flow,
        after: Handoff | None,
        seeds: Tensor | None,
        x: Tensor,
        attended: Tensor,
        *by: Any,
    ) -> tuple[Tensor, ...]:
        product = Int4Product(*by)
        branch, kept = multiply(attended, product, flow.side)
        if kept is not None:
            ctx.save_for_backward(seeds, *kept)
        ctx.flow, ctx.after, ctx.setting = flow, after, product.setting
        return _added(ctx, flow, seeds, x, branch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = grads[0]
        if dx is None:  # all that read the stream has given it no gradient
            return (None,) * len(ctx.needs_input_grad)
        seeds, *kept = ctx.saved_tensors
        dy = _of_branch(dx, ctx.flow, ctx.after, seeds, ctx.setting)
        wants_x, *wants = ctx.needs_input_grad[-1 - _PRODUCT :]
        of = multiply_backward(dy, Int4Kept(*kept), ctx.setting, wants_x, Int4Product(*wants))
        return None, None, None, dx, *of


class _Mlp(torch.autograd.Function):
    """LayerNorm → FC1 → GELU → FC2, and the stream with that added, as `_added` returns it."""

    @staticmethod
    def forward(
        ctx: Any,
        flow: _Flow,
        before: Handoff | None,
        after: Handoff | None,
        seeds: Tensor | None,
        of_add: Tensor | None,
        x: Tensor,
        *given: Any,
    ) -> tuple[Tensor, ...]:
        product1 = Int4Product(*given[_NORM:-_PRODUCT])
        product2 = Int4Product(*given[-_PRODUCT:])
        h, norm = _Norm(*given[:_NORM]).normed(flow)
        f, kept1 = multiply(h, product1, flow.side)
        del h
        branch, step2 = multiply_alone(int8_gelu(f), product2, flow.side)
        if kept1 is not None:
            of_gelu = f.q, f.scale, step2
            ctx.save_for_backward(seeds, of_add, *of_gelu, *norm, *kept1, *product2[:-1])
        ctx.flow, ctx.before, ctx.after = flow, before, after
        ctx.settings = product1.setting, product2.setting
        return _added(ctx, flow, of_add, x, branch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Make GELU's output again, to the same bits, as it is rounded to nearest."""
        dx, flow = grads[0], ctx.flow
        if dx is None:
            return (None,) * len(ctx.needs_input_grad)
        seeds, of_add, q, scale, step2, *saved = ctx.saved_tensors
        norm, kept1 = _Norm(*saved[:_NORM]), Int4Kept(*saved[_NORM : _NORM + _KEPT])
        product2 = Int4Product._make([*saved[_NORM + _KEPT :], ctx.settings[1]])
        wants1 = Int4Product(*ctx.needs_input_grad[-2 * _PRODUCT : -_PRODUCT])
        wants2 = Int4Product(*ctx.needs_input_grad[-_PRODUCT:])
        f = Quantized(q, scale, block=flow.side)
        kept2 = keep(int8_gelu(f), product2, step2)
        first, second = ctx.settings
        rounded = Rounded(flow.side, seeds[0:1])
        dy = _of_branch(dx, flow, ctx.after, of_add, second)
        g, *of_second = multiply_backward(dy, kept2, second, True, wants2, rounded)
        del kept2, dy
        # Where a transpose is written, the codes take the place of g's.
        more: dict[str, Any] = {"layout": first.layout, "inplace": first.layout == "both"}
        block = first.block(flow.side)
        df = int8_gelu_backward(f, g, seed=seeds[1:2], out_block=block, **more)
        del g
        rounded = Rounded(flow.side, seeds[2:3])
        dh, *of_first = multiply_backward(df, kept1, first, True, wants1, rounded)
        del df
        of_norm = norm.backward(dh, dx, flow, seeds[3:4], ctx.before, first)
        return *[None] * 5, *of_norm, *of_first, *of_second


# torch.compile traces the operators that these call and not their Python.
@torch.compiler.allow_in_graph
def _enter(*args: Any) -> Any:
    return _Enter.apply(*args)


@torch.compiler.allow_in_graph
def _projected(*args: Any) -> Any:
    return _Projected.apply(*args)


@torch.compiler.allow_in_graph
def _mlp(*args: Any) -> Any:
    return _Mlp.apply(*args)


def _norm_of(stream: Stream, norm: nn.LayerNorm) -> _Norm:
    q, scale = stream.codes.tensors
    return _Norm(q, scale, stream.mean, stream.rstd, norm.weight, norm.bias)


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
        checked_tokens(len(stream.x), self.int4.gradient)
        seeds = keys_for_backward(sum(_KEYS), stream.x.device, self.training)
        keys = iter([None] * len(_KEYS) if seeds is None else seeds.split(_KEYS))

        def added(handoff: Handoff | None, found: tuple[Tensor, ...]) -> Stream:
            x, q, scale, mean, rstd = found
            return Stream(x, Quantized(q, scale, block=self.flow), mean, rstd, handoff)

        own, norm = next(keys), _norm_of(stream, self.norm1)
        by = self.qkv.product(lambda: int8_dequantize(norm.normed(flow)[0]), next(keys))
        x, *parts = _enter(flow, stream.handoff, own, stream.x, *norm, *by)

        def attend(*parts: Tensor) -> Tensor:
            return self.attended(parts, batch, flow.dropout)

        own = next(keys)
        kept = attend if own is None else attention.keeps_codes(attend, self.flow, own)
        attended = kept(*parts).reshape(x.shape)
        del parts  # of which attention may keep codes
        by = self.projection.product(attended.detach, next(keys))
        compiling = torch.compiler.is_compiling()
        between, after = (None, None) if compiling else (Handoff(), Handoff())
        stream = added(between, _projected(flow, between, next(keys), x, attended, *by))
        del attended
        return added(after, self._mlp(stream, flow, keys, after))

    def _mlp(self, stream: Stream, flow: _Flow, keys: Iterator[Any], after: Handoff | None) -> Any:
        """Return the stream with what the MLP adds to it, as `_added` does."""
        own, norm = next(keys), _norm_of(stream, self.norm2)

        def normed() -> Quantized:
            return norm.normed(flow)[0]

        first = self.expand.product(lambda: int8_dequantize(normed()), next(keys))

        def activated() -> Tensor:
            """Return GELU's output, in BF16 throughout.

            Selective checkpointing counts products: a first batch may have no more of them in 4
            bits than it has when it runs again.
            """
            weight, bias = (p.detach().bfloat16() for p in (self.expand.weight, self.expand.bias))
            f = F.linear(int8_dequantize(normed()), weight, bias)
            return F.gelu(f, approximate="tanh")

        second = self.contract.product(activated, next(keys))
        tensors = own, next(keys), stream.x, *norm, *first, *second
        return _mlp(flow, stream.handoff, after, *tensors)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, flow={self.flow}"
