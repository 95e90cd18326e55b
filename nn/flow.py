"""INT8 between the layers of a pre-norm transformer block (arXiv 2403.12422, section 3).

The residual stream is BF16; what flows between the layers of a branch, and what is kept for
backward, is INT8 codes: of the norm's input and of each product's, transposed as the weight
gradient reads it. But the activation's output, the widest, is made again from its input's codes: to
the same bits, as it is rounded to nearest. So are, where less is to be kept, the norms' outputs.

What is multiplied is in blocks of one side, `block`; what flows between products, in blocks of
another, `flow`: a product's INT8 output, the inputs of norms and activations, the gradients
between. Codes that are kept for a weight's gradient alone may be in 4 bits.

The norm is LayerNorm or RMSNorm, the MLP has a GELU or SwiGLU; attention is the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from jetfire.core.errors import UsageError
from jetfire.core.once import once_differentiable
from jetfire.core.problem import Block, Layout
from jetfire.core.tensors import Quantized, ceil_div
from jetfire.nn.attention import KEYS, Attention, keeps_codes
from jetfire.nn.gathered import GatheredWeight
from jetfire.nn.linear import Int8Conv1D, Int8Linear
from jetfire.nn.made import MadeOfWeight
from jetfire.nn.products import (
    Handoff,
    flat,
    kept_input,
    keys_for_backward,
    layout_kept,
    one_way,
    quantised_gradient,
    quantised_stacked,
    restored_input,
    times_weight,
    unflat,
    weight_gradient,
    without_transpose,
)
from jetfire.nn.recipes import Kept
from jetfire.ops import (
    int8_add,
    int8_column_sum,
    int8_dropout,
    int8_dropout_backward,
    int8_gelu,
    int8_gelu_backward,
    int8_layernorm,
    int8_layernorm_add_backward,
    int8_quantize,
    int8_quantize_qkv,
    int8_rmsnorm,
    int8_rmsnorm_add_backward,
    int8_swiglu,
    int8_swiglu_backward,
    int8_transpose,
    rotary_embedding,
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


class StreamBlock(nn.Module, ABC):
    """A transformer block that reads and writes a `Stream`.

    Attributes:
        flow: side of the blocks of the stream's codes.
    """

    flow: Block

    @abstractmethod
    def forward(self, stream: Stream, batch: int) -> Stream:
        """Return the stream of batch·length tokens × width after this block."""


def checked_stream(stream: Stream, flow: Block, batch: int) -> None:
    """Look at what a block of `flow` is given.

    Raises:
        UsageError: it is no stream, or one in other blocks, or of no multiple of batch tokens.
    """
    if not isinstance(stream, Stream):
        raise UsageError(f"stream of type {type(stream).__name__}: expected a Stream")
    if stream.codes.block != flow:
        raise UsageError(f"stream in blocks of {stream.codes.block}: expected {flow}")
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch={batch}: expected an integer of at least 1")
    if stream.x.shape[0] % batch:
        raise UsageError(f"{stream.x.shape[0]} tokens: expected a multiple of batch={batch}")


# Keys that a block's forward draws: _Enter's three, then _Leave's five and those of the masks of
# the projection's output and of FC2's.
_ENTER_SEEDS, _LEAVE_SEEDS = 3, 7
_MASK0, _MASK2 = 5, 6
# Packing has random bits of its own, by any of the keys.
_PACK0 = 0

Activation = Literal["tanh", "erf", "gated"]


class Setting(NamedTuple):
    """What both halves of a block know besides their tensors.

    Attributes:
        block, flow: as in `Int8Block`.
        adds, squares: its `adds_gradients` and `squares_gradients`.
        eps: of both norms.
        dropout: probability, of both branches' outputs.
        activation: a form of GELU, or "gated": SwiGLU, the first half of whose product is the gate.
        transposed: whether weights are stored in×out, and so their gradients.
    """

    block: Block
    flow: Block
    eps: float
    dropout: float
    activation: Activation
    adds: bool = False
    squares: bool = False
    transposed: bool = False


class Product(NamedTuple):
    """Linear layers that read the same codes, multiplied by as one.

    Attributes:
        weights, biases: of each; no biases where they have none.
        codes: of the weights, out×in, under one another; with the transpose, but where they are
            gathered.
        kept: bits of what backward keeps of the input, as in `Int8Linear`.
        learns: whether a backward may follow that makes the gradient of a weight.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    codes: Quantized
    kept: Kept
    learns: bool

    @property
    def keeps(self) -> Kept | None:
        """The bits of what backward keeps of the input; None where it keeps nothing."""
        return self.kept if self.learns else None

    @property
    def bias(self) -> Tensor | None:
        """The biases one after another; None where there are none."""
        return torch.cat(self.biases) if len(self.biases) > 1 else next(iter(self.biases), None)


# How many parameters the norm has; how many weights and biases each product, and the rest of it.
Counts = tuple[int, tuple[tuple[int, int, Kept, bool], ...]]


def _flattened(norm: Sequence[Tensor], *products: Product) -> tuple[Counts, list[Tensor | None]]:
    """Return a half's parameters and codes one after another: autograd looks into no tuple."""
    counts = tuple((len(p.weights), len(p.biases), p.kept, p.learns) for p in products)
    parts = (t for p in products for t in (*p.weights, *p.biases, *p.codes[:4]))
    return (len(norm), counts), [*norm, *parts]


def _parts(
    counts: Counts, given: Sequence[Any], block: Block
) -> tuple[tuple[Any, ...], list[Product]]:
    """Return the norm's parameters and the products that `_flattened` was given.

    Of what autograd says of each tensor, in place of the tensors, it makes the same.
    """
    rest = iter(given)
    norm = tuple(islice(rest, counts[0]))
    products = [
        Product(
            tuple(islice(rest, weights)),
            tuple(islice(rest, biases)),
            Quantized._make([*islice(rest, 4), block]),
            kept,
            learns,
        )
        for weights, biases, kept, learns in counts[1]
    ]
    return norm, products


def _given(counts: Counts) -> int:
    """Return how many tensors `_flattened` gave."""
    return counts[0] + sum(weights + biases + 4 for weights, biases, *_ in counts[1])


class _Enter(torch.autograd.Function):
    """Norm → query, key and value, each a matrix of tokens × its width; the first two turned.

    Those are turned where the product put them: value is a part of the same memory, and would hold
    what they were until backward. The stream passes through: backward adds to it in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handoff: Handoff | None,
        setting: Setting,
        counts: Counts,
        widths: tuple[int, ...],
        seeds: Tensor | None,
        x: Tensor,
        q: Tensor,
        scale: Tensor,
        mean: Tensor | None,
        rstd: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        norm, (product,) = _parts(counts, given, setting.block)
        s = Quantized(q, scale, block=setting.flow)
        h, mean, rstd = _normed(s, norm, mean, rstd, layout_kept(product.keeps), setting)
        y = times_weight(h, product.codes, out="bf16", bias=product.bias)
        if cos is not None and sin is not None:
            rotary_embedding(y[:, : widths[0] + widths[1]], cos, sin, inplace=True)
        ctx.handoff, ctx.setting, ctx.counts = handoff, setting, counts
        ctx.weights = product.weights
        kept = [*_kept_of(h, product.keeps), *flat(s), *one_way(product.codes.t)]
        ctx.save_for_backward(seeds, mean, rstd, cos, sin, *_both(norm), *kept)
        return x.view_as(x), *y.split(widths, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seeds, mean, rstd, cos, sin, *norm_and_codes = ctx.saved_tensors
        norm, codes = norm_and_codes[:2], norm_and_codes[2:]
        setting, handoff = ctx.setting, ctx.handoff
        block, flow = setting.block, setting.flow
        h, (s,), wt = codes[:2], unflat(codes[2:4], flow), Quantized._make([*codes[4:], block])
        dx, *parts = grads
        if cos is not None:
            parts[:2] = (rotary_embedding(part, cos, sin, inverse=True) for part in parts[:2])
        g = side_by_side(parts, block, seeds[0:1], "both")
        del parts
        dh = times_weight(g, wt, out="int8", rounding="stochastic", seed=seeds[1:2], out_block=flow)
        _, (wanted,) = _parts(ctx.counts, ctx.needs_input_grad[-_given(ctx.counts) :], block)
        again = partial(_normed_again, h, s, norm, mean, rstd, setting)
        of_product = _gradients(g, again, ctx.weights, wanted, setting)
        del g
        layout: Layout = "q" if handoff is None else "both"
        dx, copy, *of_norm = _normed_backward(
            s, dh, norm[0], mean, rstd, dx, seeds[2:3], layout, setting
        )
        if handoff is not None:
            handoff.put(dx, copy)
        return *[None] * 5, dx, *[None] * 6, *of_norm, *of_product, *[None] * 4


class _Leave(torch.autograd.Function):
    """Attention's output → projection → add; norm → MLP → add.

    The MLP is FC1 → GELU → FC2, or the gate's and up's product → SwiGLU → down's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handoff: Handoff | None,
        setting: Setting,
        counts: Counts,
        seeds: Tensor | None,
        x: Tensor,
        attended: Tensor,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        """Drop codes as soon as no product reads them: the MLP's are the widest of a block."""
        block, flow, eps = setting.block, setting.flow, setting.eps
        norm, products = _parts(counts, given, block)
        p0, p1, p2 = products
        a = int8_quantize(attended, block=block, layout=layout_kept(p0.keeps))
        y = times_weight(a, p0.codes, out="int8", bias=p0.bias, out_block=flow)
        key = None if seeds is None else seeds[_PACK0 : _PACK0 + 1]
        kept = kept_input(a, p0.keeps, key)
        del a
        y = _dropped(y, setting, seeds, _MASK0)
        x, s, mean, rstd = int8_add(x, y, eps=eps)
        h, mean, rstd = _normed(s, norm, mean, rstd, layout_kept(p1.keeps), setting)
        f = times_weight(h, p1.codes, out="int8", bias=p1.bias, out_block=flow)
        kept += _kept_of(h, p1.keeps)
        del h
        u = _activated(f, "q", setting)
        y = times_weight(u, p2.codes, out="int8", bias=p2.bias, out_block=flow)
        del u
        y = _dropped(y, setting, seeds, _MASK2)
        out, copy, *statistics = int8_add(x, y, eps=eps)
        ctx.mark_non_differentiable(*copy.tensors, *statistics)
        if not torch.compiler.is_compiling():  # Dynamo traces no such call
            # Autograd would fill zeros for the codes' gradient: a byte per element.
            ctx.set_materialize_grads(False)
        ctx.handoff, ctx.setting, ctx.counts = handoff, setting, counts
        ctx.weights = [product.weights for product in products]
        kept += flat(s, f)
        for product in products:
            kept += one_way(product.codes.t)
        ctx.save_for_backward(seeds, mean, rstd, *_both(norm), *kept)
        return out, *copy.tensors, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Drop at once what is no longer wanted: the peak of a block's memory is in here.

        The activation's backward is that peak: of GELU f, du and dfᵀ are 4 bytes per element each.
        So the weight's gradient comes next, after which dfᵀ is not wanted, and dh after it. Of
        SwiGLU, whose f and df are twice as wide, each weight's part of dfᵀ is made when it is read.
        """
        dx = grads[0]
        if dx is None:  # all that read the stream has given it no gradient
            return (None,) * len(ctx.needs_input_grad)
        setting, block, flow = ctx.setting, ctx.setting.block, ctx.setting.flow
        _, wanted = _parts(ctx.counts, ctx.needs_input_grad[-_given(ctx.counts) :], block)
        # Read once: a checkpoint gives them away.
        seeds, mean, rstd, *codes = ctx.saved_tensors
        norm, a, h, (s, f) = codes[:2], codes[2:5], codes[5:7], unflat(codes[7:11], flow)
        w0t, w1t, w2t = (Quantized._make([*codes[i : i + 4], block]) for i in (11, 15, 19))
        del codes

        def seed(index: int) -> Tensor:
            return seeds[index : index + 1]

        def gradients(
            g: Quantized, xt: Callable[[], Quantized], index: int
        ) -> tuple[Tensor | None, ...]:
            return _gradients(g, xt, ctx.weights[index], wanted[index], setting)

        g = None if ctx.handoff is None else ctx.handoff.take(dx, "both", block)
        if g is None:
            dx = dx.contiguous()  # that of a sum has no strides
            g = quantised_gradient(dx, block, seed(0))
        g = _undropped(g, setting, seeds, _MASK2)
        of2 = gradients(g, lambda: _activated(f, "qt", setting).t, 2)
        du = times_weight(g, w2t, out="int8", rounding="stochastic", seed=seed(1), out_block=flow)
        del g
        df = _activated_backward(f, du, seed(2), any(wanted[1].biases), setting)
        del du
        of1 = gradients(df, partial(_normed_again, h, s, norm, mean, rstd, setting), 1)
        df = without_transpose(df)
        dh = times_weight(df, w1t, out="int8", rounding="stochastic", seed=seed(3), out_block=flow)
        del df
        dx, copy, *of_norm = _normed_backward(
            s, dh, norm[0], mean, rstd, dx, seed(4), "both", setting
        )
        del dh
        g = _undropped(copy, setting, seeds, _MASK0)
        del copy
        dattended = times_weight(g, w0t, out="bf16")
        of0 = gradients(g, partial(restored_input, a, w0t, seed(_PACK0)), 0)
        of_products = (t for of in (of0, of1, of2) for t in (*of, *[None] * 4))
        return *[None] * 4, dx, dattended, *of_norm, *of_products


def _normed(
    s: Quantized,
    norm: Sequence[Tensor],
    mean: Tensor | None,
    rstd: Tensor | None,
    layout: Layout,
    setting: Setting,
) -> tuple[Quantized, Tensor | None, Tensor]:
    """Return a norm's output and the statistics of its rows.

    Args:
        norm: its weight and bias; a weight alone is RMSNorm's, which has no mean.
        mean, rstd: LayerNorm's statistics where they are known.
    """
    more: dict[str, Any] = {"eps": setting.eps, "layout": layout, "out_block": setting.block}
    if len(norm) == 1:
        h, rstd = int8_rmsnorm(s, norm[0], **more)
        return h, None, rstd
    return int8_layernorm(s, *norm, mean=mean, rstd=rstd, **more)


def _both(norm: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return a norm's weight and its bias, None where it has none."""
    return norm[0], norm[1] if len(norm) > 1 else None


def _kept_of(h: Quantized, kept: Kept | None) -> list[Tensor | None]:
    """Return what backward keeps of a norm's output in 8 bits; in 4 it makes it again."""
    return [h.qt, h.scale_t] if kept == 8 else [None, None]


def _normed_again(
    h: Sequence[Tensor | None],
    s: Quantized,
    norm: Sequence[Tensor | None],
    mean: Tensor | None,
    rstd: Tensor,
    setting: Setting,
) -> Quantized:
    """Return the transpose of a norm's output, made again where `_kept_of` kept none.

    Args:
        norm: as `_both` has it.
        mean, rstd: those that forward had, or found.
    """
    q, scale = h
    if q is not None:
        return Quantized(q, scale, block=setting.block)
    parameters = [t for t in norm if t is not None]
    again, *_ = _normed(s, parameters, mean, rstd, "qt", setting)
    return again.t


def _normed_backward(
    s: Quantized,
    dh: Quantized,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    seed: Tensor,
    layout: Layout,
    setting: Setting,
) -> tuple[Any, ...]:
    """Return the stream's gradient through a norm and past it, its codes, the parameters' ones.

    Args:
        dx: that of the stream itself, past the norm.
    """
    more: dict[str, Any] = {"seed": seed, "layout": layout, "out_block": setting.block}
    if mean is None:
        return int8_rmsnorm_add_backward(s, dh, weight, rstd, dx, **more)
    return int8_layernorm_add_backward(s, dh, weight, mean, rstd, dx, **more)


def _halves(f: Quantized) -> tuple[Quantized, Quantized]:
    """Return the left and the right half of a matrix's columns, each of whole blocks."""
    parts = zip(*(part.chunk(2, dim=1) for part in f.tensors), strict=True)
    gate, up = (Quantized(q, scale, block=f.block) for q, scale in parts)
    return gate, up


def _activated(f: Quantized, layout: Layout, setting: Setting) -> Quantized:
    """Return the activation of the MLP's first product, to the same bits whenever it is made."""
    if setting.activation == "gated":
        return int8_swiglu(*_halves(f), layout=layout, out_block=setting.block)
    form = setting.activation
    return int8_gelu(f, approximate=form, layout=layout, out_block=setting.block)


def _activated_backward(
    f: Quantized, du: Quantized, seed: Tensor, biased: bool, setting: Setting
) -> Quantized:
    """Return the gradient of the MLP's first product. GELU's overwrites du.

    GELU's has a transpose. SwiGLU's has one where it is `biased`: a bias's gradient is read there.
    """
    more: dict[str, Any] = {"seed": seed, "out_block": setting.block}
    if setting.activation == "gated":
        more |= {"layout": "both" if biased else "q", "joined": True}
        return cast("Quantized", int8_swiglu_backward(*_halves(f), du, **more))
    form = setting.activation
    return int8_gelu_backward(f, du, approximate=form, layout="both", inplace=True, **more)


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Return matrices of whole blocks under one another.

    Their transposes are side by side, where all have one; else there is none.
    """
    if len(parts) == 1:
        return parts[0]
    q, scale = (torch.cat(of) for of in zip(*(part.tensors[:2] for part in parts), strict=True))
    if any(part.qt is None for part in parts):
        return Quantized(q, scale, block=parts[0].block)
    transposes = zip(*(part.t.tensors[:2] for part in parts), strict=True)
    qt, scale_t = (torch.cat(of, dim=1) for of in transposes)
    return Quantized(q, scale, qt, scale_t, parts[0].block)


def side_by_side(parts: Sequence[Tensor], block: Block, seed: Tensor, layout: Layout) -> Quantized:
    """Return the codes of the gradients of query, key and value as those of one matrix."""
    dq, dk, dv = parts
    if dq.shape == dk.shape == dv.shape:  # compared, not hashed: sizes may be symbols
        return int8_quantize_qkv(
            dq, dk, dv, block=block, rounding="stochastic", layout=layout, seed=seed
        )
    return quantised_gradient(torch.cat(list(parts), dim=1), block, seed, layout)


def _gradients(
    g: Quantized,
    xt: Callable[[], Quantized],
    weights: Sequence[Tensor],
    wanted: Product,
    setting: Setting,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a product's weights and biases.

    That of a weight is None where it was added to the one that is there, or is not wanted.

    Args:
        g: the gradient of the product's output, with its transpose or without.
        xt: gives the transpose of the product's input. Called only where a weight's is wanted.
        wanted: whether each weight's and each bias's is.
    """
    sizes = [weight.shape[1 if setting.transposed else 0] for weight in weights]
    of_weights: list[Tensor | None] = [None] * len(weights)
    if any(wanted.weights):
        of_weights = _of_weights(g, xt(), sizes, weights, wanted, setting)
    if not any(wanted.biases):
        return *of_weights, *[None] * len(wanted.biases)
    return *of_weights, *int8_column_sum(g).split(sizes)


def _of_weights(
    g: Quantized,
    xt: Quantized,
    sizes: Sequence[int],
    weights: Sequence[Tensor],
    wanted: Product,
    setting: Setting,
) -> list[Tensor | None]:
    """Return the gradients of the weights, as `_gradients` has them.

    Args:
        sizes: how many columns of g belong to each weight.
    """
    found: list[Tensor | None] = []
    for i, weight in enumerate(weights):
        gradient = None
        if wanted.weights[i]:
            gt = _transposed_part(g, sum(sizes[:i]), sizes[i])
            factors = (xt, gt) if setting.transposed else (gt, xt)
            gradient = weight_gradient(*factors, weight, setting.adds, setting.squares)
            del gt, factors
        found.append(gradient)
    return found


def _transposed_part(g: Quantized, start: int, size: int) -> Quantized:
    """Return the transpose of so many columns, made here where g has none.

    They begin with a block, and end with one or with the matrix.
    """
    block = g.block
    columns = slice(start, start + size)
    blocks = slice(start // block, start // block + ceil_div(size, block))
    if g.qt is not None and g.scale_t is not None:
        return Quantized(g.qt[columns], g.scale_t[blocks], block=block)
    q, scale = g.tensors
    return int8_transpose(Quantized(q[:, columns], scale[:, blocks], block=block))


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
    norms: Sequence[Sequence[Tensor]],
    products: Sequence[Product],
    widths: tuple[int, ...],
    attention: Attention,
    training: bool,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Stream:
    """Return the stream after a block.

    Args:
        norms: the parameters of both; those of an RMSNorm are its weight alone.
        products: that of query, key and value together, that of attention's output, and the two of
            the MLP.
        widths: columns of query, of key and of value.
        angles: cos and sin, as of `rotary_embedding`, by which query and key are turned before
            attention; None where it turns them itself, or nothing does.
    """
    seeds = keys_for_backward(_ENTER_SEEDS + _LEAVE_SEEDS, stream.x.device, training)
    enter = leave = None
    if seeds is not None:
        enter, leave = seeds[:_ENTER_SEEDS], seeds[_ENTER_SEEDS:]
    qkv, *others = products
    counts, given = _flattened(norms[0], qkv)
    codes = stream.codes[:2]
    statistics, (cos, sin) = (stream.mean, stream.rstd), angles or (None, None)
    tensors = stream.x, *codes, *statistics, cos, sin, *given
    x, *parts = _enter(stream.handoff, setting, counts, widths, enter, *tensors)
    handoff = None if torch.compiler.is_compiling() else Handoff()
    counts, given = _flattened(norms[1], *others)
    if qkv.kept == 4 and (keys := keys_for_backward(KEYS, stream.x.device, training)) is not None:
        attention = keeps_codes(attention, setting.flow, keys)
    attended = attention(*parts).reshape(x.shape[0], widths[0])
    del parts  # of which attention may keep codes
    x, q, scale, mean, rstd = _leave(handoff, setting, counts, leave, x, attended, *given)
    return Stream(x, Quantized(q, scale, block=setting.flow), mean, rstd, handoff)


class JoinedWeights(MadeOfWeight[Quantized]):
    """The codes of linear layers that read the same input, as those of one weight."""

    def of(self, layers: Sequence[Int8Linear]) -> Quantized:
        """Return the codes of the layers' weights as they are now, under one another."""
        first, *others = layers
        if any(isinstance(layer.weight, GatheredWeight) for layer in layers):
            return joined([layer.codes() for layer in layers])
        weights = (layer.weight for layer in others)
        forgotten = (layer.int8_weights()[0][1].forgotten for layer in layers)
        key = first.block, *forgotten
        return self.found(first.weight, key, lambda: self._join(layers), *weights)

    def _join(self, layers: Sequence[Int8Linear]) -> Quantized:
        """Take the codes that the layers keep, which an optimizer may renew; else make them."""
        if all(layer.int8_weights()[0][1].latest is not None for layer in layers):
            return joined([layer.codes() for layer in layers])
        return quantised_stacked([layer.weight for layer in layers], layers[0].block)


def product_of(layers: Sequence[Int8Linear | Int8Conv1D], codes: Quantized) -> Product:
    """Return the product of layers that read the same input, by the codes of their weights."""
    biases = tuple(layer.bias for layer in layers if layer.bias is not None)
    weights = tuple(layer.weight for layer in layers)
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return Product(weights, biases, codes, max(layer.kept for layer in layers), learns)
