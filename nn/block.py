"""A pre-norm transformer block with Jetfire's INT8 data flow (arXiv 2403.12422, section 3).

The residual stream is BF16; what flows between the layers of a branch, and what is kept for
backward, is INT8 codes: of LayerNorm's input and of each product's, transposed as the weight
gradient reads it. But GELU's output, the widest, is made again from its input's codes: to the same
bits, as it is rounded to nearest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.nn.linear import Int8Linear
from jetfire.nn.products import (
    Both,
    Handoff,
    Placed,
    bias_gradient,
    keys_for_backward,
    product_of_transposes,
    quantised_gradient,
)
from jetfire.ops import (
    int8_add,
    int8_add_backward,
    int8_dropout,
    int8_dropout_backward,
    int8_gelu,
    int8_gelu_backward,
    int8_gemm,
    int8_layernorm,
    int8_layernorm_backward,
    int8_quantize,
    int8_quantize_qkv,
)

Tensor = torch.Tensor


class Stream(NamedTuple):
    """The residual stream between blocks: tokens × width.

    Attributes:
        x: bf16.
        q, scale: its codes.
        mean, rstd: fp32 statistics of its rows; None where the next LayerNorm computes them.
        handoff: where the reader leaves the codes of x's gradient; None if nobody takes them.
    """

    x: Tensor
    q: Tensor
    scale: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    handoff: Handoff | None = None

    @classmethod
    def of(cls, x: Tensor, block: int) -> Stream:
        """The stream of a bf16 matrix."""
        q, scale = int8_quantize(x.detach(), block=block)
        return cls(x, q, scale)


# Keys that a block's forward draws: _Enter's four, then _Leave's six and those of the masks of the
# projection's output and of FC2's.
_ENTER_SEEDS, _LEAVE_SEEDS = 4, 8
_MASK0, _MASK2 = 6, 7


class _Setting(NamedTuple):
    """What both halves of a block know besides their tensors."""

    block: int
    batch: int
    heads: int
    eps: float
    dropout: float
    approximate: str


class _Enter(torch.autograd.Function):
    """LayerNorm → query, key, value (batch×heads×length×head).

    The stream passes through, so that backward adds to it in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any, handoff: Handoff | None, setting: _Setting, seeds: Tensor | None,
        x: Tensor, q: Tensor, scale: Tensor, mean: Tensor | None, rstd: Tensor | None,
        norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        block = setting.block
        w = Both(*codes)
        h, h_scale, ht, ht_scale, *own = int8_layernorm(
            q, scale, norm_weight, norm_bias, mean=mean, rstd=rstd, block=block, eps=setting.eps,
            layout="both",
        )  # fmt: skip
        if own:
            mean, rstd = own
        y = int8_gemm(h, h_scale, w.q, w.scale, block=block, out="bf16", bias=bias)
        ctx.handoff, ctx.setting = handoff, setting
        ctx.save_for_backward(
            seeds, q, scale, mean, rstd, norm_weight, ht, ht_scale, w.qt, w.scale_t
        )
        shape = (setting.batch, -1, 3, setting.heads, x.shape[1] // setting.heads)
        return x.view_as(x), *y.view(shape).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seeds, q, scale, mean, rstd, norm_weight, ht, ht_scale, wqt, w_scale_t = ctx.saved_tensors
        setting = ctx.setting
        block = setting.block
        dx, *dqkv = grads
        # Attention's gradients come as batch×heads×length×head, laid out as tokens × width.
        parts = (d.transpose(1, 2).reshape(dx.shape) for d in dqkv)
        g = Both(*int8_quantize_qkv(
            *parts, block=block, rounding="stochastic", layout="both", seed=seeds[0:1]
        ))  # fmt: skip
        dh, dh_scale = int8_gemm(
            g.q, g.scale, wqt, w_scale_t, block=block, out="int8", rounding="stochastic",
            seed=seeds[1:2],
        )  # fmt: skip
        dw = product_of_transposes(g.transposed, (ht, ht_scale), block, torch.float32)
        db = bias_gradient(g, block, torch.float32)
        del g
        dq, dq_scale, dnorm_weight, dnorm_bias = int8_layernorm_backward(
            q, scale, dh, dh_scale, norm_weight, mean, rstd, block=block, seed=seeds[2:3]
        )
        handoff = ctx.handoff
        dx, *copy = int8_add_backward(
            dx, dq, dq_scale, block=block, seed=seeds[3:4],
            layout="q" if handoff is None else "both",
        )  # fmt: skip
        if handoff is not None:
            handoff.put(dx, Both(*copy))
        return (
            None, None, None, dx, None, None, None, None, dnorm_weight, dnorm_bias, dw, db,
            None, None, None, None,
        )  # fmt: skip


class _Leave(torch.autograd.Function):
    """Attention's output → projection → add; LayerNorm → FC1 → GELU → FC2 → add."""

    @staticmethod
    def forward(
        ctx: Any, handoff: Handoff | None, setting: _Setting, seeds: Tensor | None,
        x: Tensor, attended: Tensor, norm_weight: Tensor, norm_bias: Tensor,
        weight0: Tensor, bias0: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor,
        bias2: Tensor, *codes: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        block, eps = setting.block, setting.eps
        w0, w1, w2 = Both(*codes[:4]), Both(*codes[4:8]), Both(*codes[8:])

        def product(a: Tensor, a_scale: Tensor, w: Both, bias: Tensor) -> tuple[Tensor, ...]:
            return int8_gemm(a, a_scale, w.q, w.scale, block=block, out="int8", bias=bias)

        a = Both(*int8_quantize(attended, block=block, layout="both"))
        y = _dropped(product(a.q, a.scale, w0, bias0), setting, seeds, _MASK0)
        x, q, scale, mean, rstd = int8_add(x, *y, block=block, eps=eps)
        h = Both(*int8_layernorm(
            q, scale, norm_weight, norm_bias, mean=mean, rstd=rstd, block=block, eps=eps,
            layout="both",
        ))  # fmt: skip
        f, f_scale = product(h.q, h.scale, w1, bias1)
        u, u_scale = int8_gelu(f, f_scale, block=block, approximate=setting.approximate)
        y = _dropped(product(u, u_scale, w2, bias2), setting, seeds, _MASK2)
        out = int8_add(x, *y, block=block, eps=eps)
        ctx.mark_non_differentiable(*out[1:])
        ctx.handoff, ctx.setting = handoff, setting
        ctx.save_for_backward(
            seeds, q, scale, mean, rstd, norm_weight, f, f_scale, *a.transposed, *h.transposed,
            *w0.transposed, *w1.transposed, *w2.transposed,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """What is no longer wanted is dropped at once: the peak of a step's memory is in here."""
        setting = ctx.setting
        block = setting.block
        saved = ctx.saved_tensors  # once: a checkpoint gives them away
        seeds, q, scale, mean, rstd, norm_weight, f, f_scale = saved[:8]
        at, ht, w0t, w1t, w2t = (saved[i : i + 2] for i in range(8, 18, 2))
        dx = grads[0]

        def seed(index: int) -> Tensor:
            return seeds[index : index + 1]

        g = None if ctx.handoff is None else ctx.handoff.take(dx)
        if g is None:
            dx = dx.contiguous()  # that of a sum has no strides
            g = quantised_gradient(dx, block, seed(0))
        g = _undropped(g, setting, seeds, _MASK2)
        ut = int8_gelu(f, f_scale, block=block, approximate=setting.approximate, layout="qt")
        dw2 = product_of_transposes(g.transposed, ut, block, torch.float32)
        db2 = bias_gradient(g, block, torch.float32)
        del ut
        du = int8_gemm(
            g.q, g.scale, *w2t, block=block, out="int8", rounding="stochastic", seed=seed(1)
        )
        df = Both(*int8_gelu_backward(
            f, f_scale, *du, block=block, approximate=setting.approximate, layout="both",
            seed=seed(2), inplace=True,
        ))  # fmt: skip
        del g, du
        dh = int8_gemm(
            df.q, df.scale, *w1t, block=block, out="int8", rounding="stochastic", seed=seed(3)
        )
        dw1 = product_of_transposes(df.transposed, ht, block, torch.float32)
        db1 = bias_gradient(df, block, torch.float32)
        del df
        dq, dq_scale, dnorm_weight, dnorm_bias = int8_layernorm_backward(
            q, scale, *dh, norm_weight, mean, rstd, block=block, seed=seed(4)
        )
        dx, *copy = int8_add_backward(dx, dq, dq_scale, block=block, layout="both", seed=seed(5))
        g = _undropped(Both(*copy), setting, seeds, _MASK0)
        dattended = int8_gemm(g.q, g.scale, *w0t, block=block, out="bf16")
        dw0 = product_of_transposes(g.transposed, at, block, torch.float32)
        db0 = bias_gradient(g, block, torch.float32)
        return (
            None, None, None, dx, dattended, dnorm_weight, dnorm_bias, dw0, db0, dw1, db1, dw2,
            db2, *[None] * 12,
        )  # fmt: skip


def _dropped(
    y: tuple[Tensor, ...], setting: _Setting, seeds: Tensor | None, index: int
) -> tuple[Tensor, ...]:
    """A branch's output after dropout, whose mask is keyed by a seed."""
    if not setting.dropout:
        return y
    assert seeds is not None
    return int8_dropout(*y, seeds[index : index + 1], p=setting.dropout, block=setting.block)


def _undropped(g: Both, setting: _Setting, seeds: Tensor, index: int) -> Both:
    """The gradient of what went into `_dropped`, from that of what came out."""
    if not setting.dropout:
        return g
    seed = seeds[index : index + 1]
    return Both(*int8_dropout_backward(
        g.q, g.scale, seed, p=setting.dropout, block=setting.block, layout="both"
    ))  # fmt: skip


class Int8Block(nn.Module):
    """LayerNorm → attention → add; LayerNorm → MLP (tanh GELU) → add, all of it in INT8.

    Attention itself is `scaled_dot_product_attention` in BF16. Parameters are fp32, under the names
    norm1, qkv, projection, norm2, expand and contract.

    Args:
        width: of the stream, a multiple of heads.
        dropout: probability, of attention's weights and of both branches' outputs.
        block: 32, 64 or 128, the side of a quantisation block.
    """

    @checked
    def __init__(
        self, width: int, heads: int, dropout: float = 0.0, block: int = 32, device: Placed = None
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(f"width={width}: expected a multiple of heads={heads}")
        if not 0.0 <= dropout < 1.0:
            raise UsageError(f"dropout={dropout}: expected at least 0 and less than 1")
        self.width, self.heads, self.dropout, self.block = width, heads, dropout, block
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.norm1, self.norm2 = nn.LayerNorm(width, **fp32), nn.LayerNorm(width, **fp32)

        def linear(inputs: int, outputs: int) -> Int8Linear:
            return Int8Linear(inputs, outputs, block=block, **fp32)

        self.qkv, self.projection = linear(width, 3 * width), linear(width, width)
        self.expand, self.contract = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, stream: Stream, batch: int) -> Stream:
        """The stream of batch·length tokens × width after this block."""
        if not isinstance(stream, Stream):
            raise UsageError(f"stream of type {type(stream).__name__}: expected a Stream")
        if not isinstance(batch, int) or batch < 1:
            raise UsageError(f"batch={batch}: expected an integer of at least 1")
        if stream.x.shape[0] % batch:
            raise UsageError(f"{stream.x.shape[0]} tokens: expected a multiple of batch={batch}")
        dropout = self.dropout if self.training else 0.0
        setting = _Setting(self.block, batch, self.heads, self.norm1.eps, dropout, "tanh")
        seeds = keys_for_backward(_ENTER_SEEDS + _LEAVE_SEEDS, stream.x.device, self.training)
        enter = leave = None
        if seeds is not None:
            enter, leave = seeds[:_ENTER_SEEDS], seeds[_ENTER_SEEDS:]
        x, query, key, value = _Enter.apply(
            stream.handoff, setting, enter, *stream[:5], self.norm1.weight, self.norm1.bias,
            self.qkv.weight, self.qkv.bias, *self.qkv.codes(),
        )  # fmt: skip
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        linears = (self.projection, self.expand, self.contract)
        handoff = None if torch.compiler.is_compiling() else Handoff()
        out = _Leave.apply(
            handoff, setting, leave, x, attended.transpose(1, 2).reshape(x.shape),
            self.norm2.weight, self.norm2.bias,
            *(p for linear in linears for p in (linear.weight, linear.bias)),
            *(t for linear in linears for t in linear.codes()),
        )  # fmt: skip
        return Stream(*out)._replace(handoff=handoff)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, block={self.block}"
