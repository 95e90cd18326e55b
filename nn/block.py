"""A pre-norm transformer block with Jetfire's INT8 data flow (arXiv 2403.12422, section 3).

The residual stream is BF16; what flows between the layers of a branch, and what is kept for
backward, is INT8 codes: of LayerNorm's input and of each product's, transposed as the weight
gradient reads it. But GELU's output, the widest, is made again from its input's codes: to the same
bits, as it is rounded to nearest.

What is multiplied is in blocks of one side, `block`; what flows between products, in blocks of
another, `flow`: a product's INT8 output, LayerNorm's and GELU's inputs, the gradients between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block, Layout
from jetfire.core.tensors import Quantized
from jetfire.nn.linear import Int8Conv1D, Int8Linear
from jetfire.nn.products import (
    Handoff,
    Placed,
    alone,
    checked_block,
    flat,
    keys_for_backward,
    quantised_gradient,
    unflat,
    weight_gradient,
)
from jetfire.ops import (
    int8_add,
    int8_column_sum,
    int8_dropout,
    int8_dropout_backward,
    int8_gelu,
    int8_gelu_backward,
    int8_gemm,
    int8_layernorm,
    int8_layernorm_add_backward,
    int8_quantize,
    int8_quantize_qkv,
)

Tensor = torch.Tensor


class Stream(NamedTuple):
    """The residual stream between blocks: tokens × width.

    Attributes:
        x: bf16.
        codes: x, quantised.
        mean, rstd: fp32 statistics of its rows; None where the next LayerNorm computes them.
        handoff: where the reader leaves the codes of x's gradient; None if nobody takes them.
    """

    x: Tensor
    codes: Quantized
    mean: Tensor | None = None
    rstd: Tensor | None = None
    handoff: Handoff | None = None

    @classmethod
    def of(cls, x: Tensor, block: Block) -> Stream:
        """Return the stream of a bf16 matrix, its codes in blocks of the flow's side."""
        return cls(x, int8_quantize(x.detach(), block=block))


# Keys that a block's forward draws: _Enter's three, then _Leave's five and those of the masks of
# the projection's output and of FC2's.
_ENTER_SEEDS, _LEAVE_SEEDS = 3, 7
_MASK0, _MASK2 = 5, 6


class Setting(NamedTuple):
    """What both halves of a block know besides their tensors.

    Attributes:
        block, flow, adds: as in `Int8Block`.
        eps: of both norms.
        dropout: probability, of both branches' outputs.
        transposed: whether weights are stored in×out, and so their gradients.
    """

    block: Block
    flow: Block
    batch: int
    heads: int
    eps: float
    dropout: float
    approximate: Literal["tanh", "erf"]
    adds: bool
    transposed: bool


class _Enter(torch.autograd.Function):
    """LayerNorm → query, key, value (batch×heads×length×head).

    The stream passes through, so that backward adds to it in one pass. `codes` are the tensors of
    the weight's `Quantized`: autograd looks into no tuple.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handoff: Handoff | None,
        setting: Setting,
        seeds: Tensor | None,
        x: Tensor,
        q: Tensor,
        scale: Tensor,
        mean: Tensor | None,
        rstd: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor,
        *codes: Tensor,
    ) -> tuple[Tensor, ...]:
        block = setting.block
        s, w = Quantized(q, scale, block=setting.flow), Quantized.of(codes, "both", block)
        h, mean, rstd = int8_layernorm(
            s,
            norm_weight,
            norm_bias,
            mean=mean,
            rstd=rstd,
            eps=setting.eps,
            layout="both",
            out_block=block,
        )
        y = int8_gemm(h, w, out="bf16", bias=bias)
        ctx.handoff, ctx.setting, ctx.weight = handoff, setting, weight
        ctx.save_for_backward(seeds, mean, rstd, norm_weight, *flat(s, h.t, w.t))
        shape = (setting.batch, -1, 3, setting.heads, x.shape[1] // setting.heads)
        return x.view_as(x), *y.view(shape).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seeds, mean, rstd, norm_weight, *codes = ctx.saved_tensors
        block, flow, handoff = ctx.setting.block, ctx.setting.flow, ctx.handoff
        (s,), (ht, wt) = unflat(codes[:2], flow), unflat(codes[2:], block)
        dx, *dqkv = grads
        # Attention's gradients come as batch×heads×length×head, laid out as tokens × width.
        parts = (d.transpose(1, 2).reshape(dx.shape) for d in dqkv)
        g = int8_quantize_qkv(
            *parts, block=block, rounding="stochastic", layout="both", seed=seeds[0:1]
        )
        dh = int8_gemm(g, wt, out="int8", rounding="stochastic", seed=seeds[1:2], out_block=flow)
        dw = _weight_gradient(g, ht, ctx.weight, ctx.setting)
        db = int8_column_sum(g)
        del g
        layout: Layout = "q" if handoff is None else "both"
        dx, copy, dnorm_weight, dnorm_bias = int8_layernorm_add_backward(
            s, dh, norm_weight, mean, rstd, dx, seed=seeds[2:3], layout=layout, out_block=block
        )
        if handoff is not None:
            handoff.put(dx, copy)
        of_norm_and_qkv = dnorm_weight, dnorm_bias, dw, db
        return None, None, None, dx, None, None, None, None, *of_norm_and_qkv, *[None] * 4


class _Leave(torch.autograd.Function):
    """Attention's output → projection → add; LayerNorm → FC1 → GELU → FC2 → add.

    `codes` are the tensors of the three weights' `Quantized`, one after another.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handoff: Handoff | None,
        setting: Setting,
        seeds: Tensor | None,
        x: Tensor,
        attended: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight0: Tensor,
        bias0: Tensor,
        weight1: Tensor,
        bias1: Tensor,
        weight2: Tensor,
        bias2: Tensor,
        *codes: Tensor,
    ) -> tuple[Tensor, ...]:
        """Drop codes as soon as no product reads them: GELU's alone are 4 bytes per element."""
        block, flow, eps = setting.block, setting.flow, setting.eps
        w0, w1, w2 = (Quantized.of(codes[i : i + 4], "both", block) for i in (0, 4, 8))
        a = int8_quantize(attended, block=block, layout="both")
        y = int8_gemm(a, w0, out="int8", bias=bias0, out_block=flow)
        at = alone(a.t)
        del a
        y = _dropped(y, setting, seeds, _MASK0)
        x, s, mean, rstd = int8_add(x, y, eps=eps)
        h, *_ = int8_layernorm(
            s,
            norm_weight,
            norm_bias,
            mean=mean,
            rstd=rstd,
            eps=eps,
            layout="both",
            out_block=block,
        )
        f = int8_gemm(h, w1, out="int8", bias=bias1, out_block=flow)
        ht = alone(h.t)
        del h
        u = int8_gelu(f, approximate=setting.approximate, out_block=block)
        y = int8_gemm(u, w2, out="int8", bias=bias2, out_block=flow)
        del u
        y = _dropped(y, setting, seeds, _MASK2)
        out, copy, *statistics = int8_add(x, y, eps=eps)
        ctx.mark_non_differentiable(*copy.tensors, *statistics)
        if not torch.compiler.is_compiling():  # Dynamo traces no such call
            # Autograd would fill zeros for the codes' gradient: a byte per element.
            ctx.set_materialize_grads(False)
        ctx.handoff, ctx.setting, ctx.weights = handoff, setting, (weight0, weight1, weight2)
        kept = flat(s, f, at, ht, w0.t, w1.t, w2.t)
        ctx.save_for_backward(seeds, mean, rstd, norm_weight, *kept)
        return out, *copy.tensors, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Drop at once what is no longer wanted: the peak of a block's memory is in here.

        GELU's backward is that peak, with f, du and dfᵀ, 4 bytes per element each. So the weight's
        gradient comes next, after which dfᵀ is not wanted, and dh after it.
        """
        dx = grads[0]
        if dx is None:  # all that read the stream has given it no gradient
            return (None,) * len(ctx.needs_input_grad)
        setting = ctx.setting
        block, flow = setting.block, setting.flow
        weight0, weight1, weight2 = ctx.weights
        # Read once: a checkpoint gives them away.
        seeds, mean, rstd, norm_weight, *codes = ctx.saved_tensors
        (s, f), (at, ht, w0t, w1t, w2t) = unflat(codes[:4], flow), unflat(codes[4:], block)
        del codes

        def seed(index: int) -> Tensor:
            return seeds[index : index + 1]

        g = None if ctx.handoff is None else ctx.handoff.take(dx)
        if g is None:
            dx = dx.contiguous()  # that of a sum has no strides
            g = quantised_gradient(dx, block, seed(0))
        g = _undropped(g, setting, seeds, _MASK2)
        u = int8_gelu(f, approximate=setting.approximate, layout="qt", out_block=block)
        dw2 = _weight_gradient(g, u.t, weight2, setting)
        db2 = int8_column_sum(g)
        del u
        du = int8_gemm(g, w2t, out="int8", rounding="stochastic", seed=seed(1), out_block=flow)
        del g
        df = int8_gelu_backward(
            f,
            du,
            approximate=setting.approximate,
            layout="both",
            seed=seed(2),
            inplace=True,
            out_block=block,
        )
        del du
        dw1 = _weight_gradient(df, ht, weight1, setting)
        db1 = int8_column_sum(df)
        df = alone(df)
        dh = int8_gemm(df, w1t, out="int8", rounding="stochastic", seed=seed(3), out_block=flow)
        del df
        dx, copy, dnorm_weight, dnorm_bias = int8_layernorm_add_backward(
            s, dh, norm_weight, mean, rstd, dx, seed=seed(4), layout="both", out_block=block
        )
        del dh
        g = _undropped(copy, setting, seeds, _MASK0)
        del copy
        dattended = int8_gemm(g, w0t, out="bf16")
        dw0 = _weight_gradient(g, at, weight0, setting)
        db0 = int8_column_sum(g)
        of_linears = dw0, db0, dw1, db1, dw2, db2
        of_parameters = dnorm_weight, dnorm_bias, *of_linears
        return None, None, None, dx, dattended, *of_parameters, *[None] * 12


def _weight_gradient(
    g: Quantized, xt: Quantized, weight: Tensor, setting: Setting
) -> Tensor | None:
    """Return a weight's gradient, or None where it was added to the one that is there.

    Args:
        g: the gradient of the product's output, with its transpose.
        xt: the transpose of the product's input.
    """
    factors = (xt, g.t) if setting.transposed else (g.t, xt)
    return weight_gradient(*factors, weight, setting.adds)


def _dropped(y: Quantized, setting: Setting, seeds: Tensor | None, index: int) -> Quantized:
    """Return a branch's output after dropout, whose mask is keyed by a seed."""
    if not setting.dropout:
        return y
    assert seeds is not None
    return int8_dropout(y, seeds[index : index + 1], p=setting.dropout)


def _undropped(g: Quantized, setting: Setting, seeds: Tensor, index: int) -> Quantized:
    """Return the gradient of what went into `_dropped`, from that of what came out."""
    if not setting.dropout:
        return g
    return int8_dropout_backward(g, seeds[index : index + 1], p=setting.dropout, layout="both")


# Returns attention of query, key and value, batch×heads×length×head, as batch×length×heads×head.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# torch.compile traces the operators that these call and not their Python, a tenth of a second each.
@torch.compiler.allow_in_graph
def _enter(*args: Any) -> Any:
    return _Enter.apply(*args)


@torch.compiler.allow_in_graph
def _leave(*args: Any) -> Any:
    return _Leave.apply(*args)


def flowed(
    stream: Stream,
    setting: Setting,
    norms: tuple[nn.LayerNorm, nn.LayerNorm],
    linears: tuple[Int8Linear | Int8Conv1D, ...],
    attention: Attention,
    training: bool,
) -> Stream:
    """Return the stream after a block.

    Args:
        linears: those of query, key and value together, of attention's output, and both of the MLP.
    """
    seeds = keys_for_backward(_ENTER_SEEDS + _LEAVE_SEEDS, stream.x.device, training)
    enter = leave = None
    if seeds is not None:
        enter, leave = seeds[:_ENTER_SEEDS], seeds[_ENTER_SEEDS:]
    qkv, *others = linears
    x, *parts = _enter(
        stream.handoff,
        setting,
        enter,
        stream.x,
        *stream.codes[:2],
        stream.mean,
        stream.rstd,
        norms[0].weight,
        norms[0].bias,
        qkv.weight,
        qkv.bias,
        *qkv.codes().tensors,
    )
    handoff = None if torch.compiler.is_compiling() else Handoff()
    x, q, scale, mean, rstd = _leave(
        handoff,
        setting,
        leave,
        x,
        attention(*parts).reshape(x.shape),
        norms[1].weight,
        norms[1].bias,
        *(p for linear in others for p in (linear.weight, linear.bias)),
        *(t for linear in others for t in linear.codes().tensors),
    )
    return Stream(x, Quantized(q, scale, block=setting.flow), mean, rstd, handoff)


class Int8Block(nn.Module):
    """LayerNorm → attention → add; LayerNorm → MLP (tanh GELU) → add, all of it in INT8.

    Attention itself is `scaled_dot_product_attention` in BF16. Parameters are fp32, under the names
    norm1, qkv, projection, norm2, expand and contract.

    Args:
        width: of the stream, a multiple of heads.
        dropout: probability, of attention's weights and of both branches' outputs.
        block: 32, 64 or 128, the side of the blocks whose codes are multiplied.
        flow: as `block`, of what flows between products; None is `block`.

    Attributes:
        adds_gradients: where a weight has a gradient, add to it in the product that makes the next
            one, and give autograd none. Else the next ones of projection, FC1 and FC2 are held at
            once: 36·width² bytes. Only where nothing waits for autograd to accumulate: no hook, no
            DDP, no FSDP.
    """

    @checked
    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        block: int = 32,
        flow: int | None = None,
        device: Placed = None,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(f"width={width}: expected a multiple of heads={heads}")
        if not 0.0 <= dropout < 1.0:
            raise UsageError(f"dropout={dropout}: expected at least 0 and less than 1")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.block = checked_block(block)
        self.flow = self.block if flow is None else checked_block(flow, "flow")
        self.adds_gradients = False
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.norm1, self.norm2 = nn.LayerNorm(width, **fp32), nn.LayerNorm(width, **fp32)

        def linear(inputs: int, outputs: int) -> Int8Linear:
            return Int8Linear(inputs, outputs, block=block, **fp32)

        self.qkv, self.projection = linear(width, 3 * width), linear(width, width)
        self.expand, self.contract = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, stream: Stream, batch: int) -> Stream:
        """Return the stream of batch·length tokens × width after this block."""
        if not isinstance(stream, Stream):
            raise UsageError(f"stream of type {type(stream).__name__}: expected a Stream")
        if stream.codes.block != self.flow:
            raise UsageError(f"stream in blocks of {stream.codes.block}: expected {self.flow}")
        if not isinstance(batch, int) or batch < 1:
            raise UsageError(f"batch={batch}: expected an integer of at least 1")
        if stream.x.shape[0] % batch:
            raise UsageError(f"{stream.x.shape[0]} tokens: expected a multiple of batch={batch}")
        dropout = self.dropout if self.training else 0.0
        setting = Setting(
            self.block,
            self.flow,
            batch,
            self.heads,
            self.norm1.eps,
            dropout,
            "tanh",
            self.adds_gradients,
            transposed=False,
        )

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True
            )
            return attended.transpose(1, 2)

        linears = self.qkv, self.projection, self.expand, self.contract
        return flowed(stream, setting, (self.norm1, self.norm2), linears, attention, self.training)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, block={self.block}, flow={self.flow}"
