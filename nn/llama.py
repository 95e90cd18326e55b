"""Llama's transformer block with INT8 between its layers: RMSNorm, rotary embeddings, SwiGLU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.nn.flow import (
    JoinedWeights,
    Setting,
    Stream,
    StreamBlock,
    checked_stream,
    flowed,
    product_of,
)
from jetfire.nn.linear import Int8Linear
from jetfire.nn.made import wait_for
from jetfire.nn.products import Placed, checked_block
from jetfire.nn.sizes import check_llama

Tensor = torch.Tensor
_MOST_TABLES = 16  # sequences may have any length


class Int8LlamaBlock(StreamBlock):
    """RMSNorm → attention → add; RMSNorm → SwiGLU → add, all of it in INT8 (arXiv 2307.09288).

    Attention itself is `scaled_dot_product_attention` in BF16, of queries and keys with rotary
    position embeddings (arXiv 2104.09864), the two halves of a head rotated as in `transformers`.
    Parameters are fp32, under the names norm1, query, key, value, projection, norm2, gate, up and
    down.

    Args:
        width: of the stream, heads times an even head size.
        kv_heads: heads of keys and values, a divisor of heads (grouped-query attention, arXiv
            2305.13245); None is as many as of queries.
        hidden: width of the MLP; None is 8/3 of width, rounded up to a multiple of 256.
        dropout: probability, of attention's weights and of both branches' outputs.
        bias: whether query, key and value have one, as Qwen2's have.
        window: how many tokens a token sees, itself included; None is all before it.
        theta: base of the rotary embeddings' wavelengths.
        block: 32, 64 or 128, the side of the blocks whose codes are multiplied. Widths of query,
            key, value and MLP are multiples of it.
        flow: as `block`, of what flows between products, and a divisor of the MLP's width; None is
            `block`.
        kept: as in `Int8Block`.

    Attributes:
        adds_gradients, squares_gradients: as in `Int8Block`.
    """

    @checked
    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        window: int | None = None,
        eps: float = 1e-5,
        theta: float = 10000.0,
        block: int = 32,
        flow: int | None = None,
        kept: int = 8,
        device: Placed = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        hidden = -(-width * 8 // 3 // 256) * 256 if hidden is None else hidden
        self.block = checked_block(block)
        self.flow = self.block if flow is None else checked_block(flow, "flow")
        check_llama(width, heads, kv_heads, hidden, self.block, self.flow)
        if not 0.0 <= dropout < 1.0:
            raise UsageError(f"dropout={dropout}: expected at least 0 and less than 1")
        if window is not None and window < 1:
            raise UsageError(f"window={window}: expected at least 1")
        for name, number in (("eps", eps), ("theta", theta)):
            if not 0.0 < number < math.inf:
                raise UsageError(f"{name}={number}: expected a positive number")
        self.width, self.heads, self.kv_heads, self.hidden = width, heads, kv_heads, hidden
        self.dropout, self.window, self.eps, self.theta = dropout, window, eps, theta
        self.adds_gradients = self.squares_gradients = False
        of_kv = width // heads * kv_heads
        fp32: dict[str, Any] = {"device": device, "dtype": torch.float32}

        def linear(inputs: int, outputs: int, bias: bool = False) -> Int8Linear:
            return Int8Linear(inputs, outputs, bias, self.block, kept=kept, **fp32)

        self.norm1, self.norm2 = nn.RMSNorm(width, eps, **fp32), nn.RMSNorm(width, eps, **fp32)
        self.query = linear(width, width, bias)
        self.key, self.value = linear(width, of_kv, bias), linear(width, of_kv, bias)
        self.projection = linear(width, width)
        self.gate, self.up = linear(width, hidden), linear(width, hidden)
        self.down = linear(hidden, width)
        self._joined = JoinedWeights(), JoinedWeights()

    def forward(self, stream: Stream, batch: int) -> Stream:
        """Return the stream of batch·length tokens × width after this block."""
        checked_stream(stream, self.flow, batch)
        dropout = self.dropout if self.training else 0.0
        of_gradients = self.adds_gradients, self.squares_gradients
        setting = Setting(self.block, self.flow, self.eps, dropout, "gated", *of_gradients)
        (of_qkv, qkv), (of_gate_up, gate_up) = self.joined_groups()
        products = [
            product_of(qkv, of_qkv.of(qkv)),
            product_of([self.projection], self.projection.codes()),
            product_of(gate_up, of_gate_up.of(gate_up)),
            product_of([self.down], self.down.codes()),
        ]

        def attention(*parts: Tensor) -> Tensor:
            return self._attention(parts, batch, dropout)

        norms = [(self.norm1.weight,), (self.norm2.weight,)]
        widths = tuple(layer.out_features for layer in qkv)
        length, head, device = stream.x.shape[0] // batch, self.width // self.heads, stream.x.device
        angles = rotary_tables(length, batch, head, self.theta, device)
        how = attention, self.training, angles
        return flowed(stream, setting, norms, products, widths, *how)

    def joined_groups(self) -> list[tuple[JoinedWeights, tuple[Int8Linear, ...]]]:
        """Return the layers that are multiplied by as one, with the codes of each group."""
        groups = (self.query, self.key, self.value), (self.gate, self.up)
        return list(zip(self._joined, groups, strict=True))

    def _attention(self, parts: tuple[Tensor, ...], batch: int, dropout: float) -> Tensor:
        """Return attention of turned query and key, and value, as batch×length×heads×head."""
        head, length = self.width // self.heads, parts[0].shape[0] // batch
        query, key, value = (
            t.view(batch, length, t.shape[1] // head, head).transpose(1, 2) for t in parts
        )
        mask = None
        if self.window is not None and self.window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = seen.tril().triu(1 - self.window)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            enable_gqa=self.kv_heads != self.heads,
        )
        return attended.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"width={self.width}, heads={self.heads}, kv_heads={self.kv_heads}, "
            f"hidden={self.hidden}, block={self.block}, flow={self.flow}"
        )


_Tables = tuple[Tensor, Tensor]
_tables: dict[tuple[Any, ...], tuple[_Tables, torch.cuda.Stream | None]] = {}  # and where made
_read_by_graphs: set[tuple[Any, ...]] = set()  # keys of those that are kept for good


def rotary_tables(
    length: int, batch: int, head: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each token's angles: batch·length × head/2, fp32.

    Those of the last lengths are kept; not what is traced, or made while a CUDA graph is captured.
    """
    key = length, batch, head, theta, device
    cuda = device.type == "cuda"
    captured = cuda and torch.cuda.is_current_stream_capturing()
    if key in _tables:
        made, stream = _tables[key]
        if captured:
            _read_by_graphs.add(key)
        if stream is not None and not torch.compiler.is_compiling():
            wait_for(stream, made)
        return made
    with torch.inference_mode(False):  # or backward could not save them
        pairs = torch.arange(0, head, 2, dtype=torch.float64, device=device) / head
        positions = torch.arange(length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, theta**-pairs).repeat(batch, 1)
        made = angles.cos().float(), angles.sin().float()
    if type(made[0]) is Tensor and not captured and not torch.compiler.is_compiling():
        others = _tables.keys() - _read_by_graphs
        if len(others) == _MOST_TABLES:
            for other in others:
                del _tables[other]
        _tables[key] = made, torch.cuda.current_stream(device) if cuda else None
    return made
