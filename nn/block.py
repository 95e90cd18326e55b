"""The transformer block of `jetfire-train`'s GPT-2, with INT8 between its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.problem import Block
from jetfire.nn.flow import Setting, Stream, StreamBlock, checked_stream, flowed, product_of
from jetfire.nn.linear import Int8Linear
from jetfire.nn.products import Placed, checked_block

Tensor = torch.Tensor


class GPT2StreamBlock(StreamBlock):
    """The layers of GPT-2's block, under the names norm1, qkv, projection, norm2, expand, contract.

    Args:
        linear: makes a linear layer of inputs and outputs.
        fp32: device and dtype of the norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        flow: Block,
        linear: Callable[[int, int], nn.Linear],
        fp32: Mapping[str, Any],
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(f"width={width}: expected a multiple of heads={heads}")
        if not 0.0 <= dropout < 1.0:
            raise UsageError(f"dropout={dropout}: expected at least 0 and less than 1")
        self.width, self.heads, self.dropout, self.flow = width, heads, dropout, flow
        self.norm1, self.norm2 = nn.LayerNorm(width, **fp32), nn.LayerNorm(width, **fp32)
        self.qkv, self.projection = linear(width, 3 * width), linear(width, width)
        self.expand, self.contract = linear(width, 4 * width), linear(4 * width, width)

    def attended(self, parts: Sequence[Tensor], batch: int, dropout: float) -> Tensor:
        """Return attention to the past as batch×length×heads×head.

        Args:
            parts: query, key and value, each a matrix of batch·length tokens × width.
            dropout: probability, of its weights.
        """
        head = self.width // self.heads
        query, key, value = (p.view(batch, -1, self.heads, head).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return attended.transpose(1, 2)


class Int8Block(GPT2StreamBlock):
    """LayerNorm → attention → add; LayerNorm → MLP (tanh GELU) → add, all of it in INT8.

    Attention itself is `scaled_dot_product_attention` in BF16. Parameters are fp32, under the names
    norm1, qkv, projection, norm2, expand and contract.

    Args:
        width: of the stream, a multiple of heads.
        dropout: probability, of attention's weights and of both branches' outputs.
        block: 32, 64 or 128, the side of the blocks whose codes are multiplied.
        flow: as `block`, of what flows between products; None is `block`.
        kept: as of `Int8Linear`, of the input of attention's projection. FC2's is made again from
            GELU's, and with 4 the norms' outputs from their inputs; attention then keeps INT8 codes
            (`jetfire.nn.attention`).

    Attributes:
        adds_gradients: where a weight has a gradient, add to it in the product that makes the next
            one, and give autograd none. Else the next ones of projection, FC1 and FC2 are held at
            once: 36·width² bytes. Only where nothing waits for autograd to accumulate: no hook, no
            DDP, no FSDP.
        squares_gradients: where an fp32 weight's gradient is made, and not added, add up its
            squares with it, for `gradient_norm`: 4 bytes per 512 elements, kept until the next.
            Only where torch counts each change of a gradient until then: not with a GradScaler, nor
            where processes reduce it.
    """

    qkv: Int8Linear
    projection: Int8Linear
    expand: Int8Linear
    contract: Int8Linear

    @checked
    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        block: int = 32,
        flow: int | None = None,
        device: Placed = None,
        kept: int = 8,
    ) -> None:
        side = checked_block(block)
        between = side if flow is None else checked_block(flow, "flow")
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}
        linear = partial(Int8Linear, block=block, kept=kept, **fp32)
        super().__init__(width, heads, dropout, between, linear, fp32)
        self.block = side
        self.adds_gradients = self.squares_gradients = False

    def forward(self, stream: Stream, batch: int) -> Stream:
        """Return the stream of batch·length tokens × width after this block."""
        checked_stream(stream, self.flow, batch)
        dropout = self.dropout if self.training else 0.0
        of_gradients = self.adds_gradients, self.squares_gradients
        setting = Setting(self.block, self.flow, self.norm1.eps, dropout, "tanh", *of_gradients)

        def attention(*parts: Tensor) -> Tensor:
            return self.attended(parts, batch, dropout)

        norms = [(norm.weight, norm.bias) for norm in (self.norm1, self.norm2)]
        linears = self.qkv, self.projection, self.expand, self.contract
        products = [product_of([linear], linear.codes()) for linear in linears]
        widths = (self.width,) * 3
        return flowed(stream, setting, norms, products, widths, attention, self.training)

    def extra_repr(self) -> str:
        return f"width={self.width}, heads={self.heads}, block={self.block}, flow={self.flow}"
