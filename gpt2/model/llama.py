"""Llama's block as torch does it (Touvron et al., 2023), beside which INT8's is measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.nn import Int4Linear, Int8LlamaBlock
from jetfire.nn.llama import rotary_tables
from jetfire.nn.recipes import Recipe


class LlamaBlock(nn.Module):
    """RMSNorm → attention with rotary embeddings → add; RMSNorm → SwiGLU → add.

    Parameters are named as `Int8LlamaBlock`'s.

    Args:
        context: the most tokens of a sequence.
        linear: makes a linear layer of inputs and outputs.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        context: int,
        linear: Callable[[int, int], nn.Linear],
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        tables = rotary_tables(context, 1, width // heads, 10000.0, torch.get_default_device())
        for name, table in zip(("cos", "sin"), tables, strict=True):
            whole = torch.cat([table, table], dim=1)
            self.register_buffer(name, whole.bfloat16(), persistent=False)
        of_kv = width // heads * kv_heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, 1e-5, dtype=torch.float32) for _ in range(2))
        self.query, self.key, self.value = (linear(width, n) for n in (width, of_kv, of_kv))
        self.projection = linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, hidden),
            linear(width, hidden),
            linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        query, key, value = (
            layer(h).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        cos, sin = self.cos[:length], self.sin[:length]
        attended = F.scaled_dot_product_attention(
            _turned(query, cos, sin),
            _turned(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of each head, as `transformers` does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def llama_block_of(
    width: int, heads: int, kv_heads: int, hidden: int, context: int, recipe: Recipe
) -> LlamaBlock | Int8LlamaBlock:
    """Return a block whose products are a recipe's."""
    sizes = width, heads, kv_heads, hidden
    if recipe.block is not None:
        return Int8LlamaBlock(*sizes, block=recipe.block, flow=recipe.flow)
    if recipe.int4 is not None:
        kind = partial(Int4Linear, bias=False, int4=recipe.int4, dtype=torch.float32)
        return LlamaBlock(*sizes, context, kind)
    return LlamaBlock(*sizes, context, partial(nn.Linear, bias=False, dtype=torch.float32))
