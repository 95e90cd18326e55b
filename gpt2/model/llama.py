"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, a gated MLP, no biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.gpt2.model.language_model import LanguageModel, linear_of
from jetfire.gpt2.model.shape import LlamaShape, Shape
from jetfire.nn import Int8LlamaBlock
from jetfire.nn.llama import rotary_tables
from jetfire.nn.recipes import Recipe

EPS, THETA = 1e-5, 10000.0  # of Llama 2, and of TinyLlama (arXiv 2401.02385)


class LlamaBlock(nn.Module):
    """RMSNorm → attention with rotary embeddings → add; RMSNorm → SwiGLU → add.

    Parameters are named as `Int8LlamaBlock`'s.

    Args:
        linear: makes a linear layer of inputs and outputs.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: LlamaShape, linear: Callable[[int, int], nn.Linear]) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads, self.kv_heads, self.dropout = shape.heads, shape.kv_heads, shape.dropout
        head = width // shape.heads
        tables = rotary_tables(shape.context, 1, head, THETA, torch.get_default_device())
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, torch.cat([table, table], dim=1), persistent=False)
        of_kv = head * shape.kv_heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, EPS, dtype=torch.float32) for _ in range(2))
        self.query, self.key, self.value = (linear(width, n) for n in (width, of_kv, of_kv))
        self.projection = linear(width, width)
        self.gate, self.up, self.down = (
            linear(width, hidden),
            linear(width, hidden),
            linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        dropout = self.dropout if self.training else 0.0
        h = self.norm1(x)
        query, key, value = (
            layer(h).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        cos, sin = (table[:length].to(query.dtype) for table in (self.cos, self.sin))
        attended = F.scaled_dot_product_attention(
            _turned(query, cos, sin),
            _turned(key, cos, sin),
            value,
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        y = self.projection(attended.transpose(1, 2).reshape(x.shape))
        x = x + F.dropout(y, dropout)
        h = self.norm2(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), dropout)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of each head, as `transformers` does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Llama(LanguageModel):
    """Llama, whose blocks turn queries and keys by their positions."""

    norm: nn.RMSNorm

    @staticmethod
    def block_of(shape: Shape, recipe: Recipe) -> LlamaBlock | Int8LlamaBlock:
        assert isinstance(shape, LlamaShape)
        if recipe.block is not None and recipe.flow is not None:
            return Int8LlamaBlock(
                shape.width,
                shape.heads,
                shape.kv_heads,
                shape.hidden,
                dropout=shape.dropout,
                eps=EPS,
                theta=THETA,
                block=recipe.block,
                flow=recipe.flow,
                kept=recipe.kept,
            )
        return LlamaBlock(shape, partial(linear_of(recipe), bias=False))

    @staticmethod
    def norm_of(width: int) -> nn.RMSNorm:
        return nn.RMSNorm(width, EPS, dtype=torch.float32)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.norm.normalized_shape, self.norm.weight.to(x.dtype), EPS)
