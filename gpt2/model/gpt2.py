"""GPT-2 (Radford et al., 2019): pre-norm transformer, tanh GELU, tied output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.gpt2.model.language_model import LanguageModel, linear_of
from jetfire.gpt2.model.shape import Shape
from jetfire.nn import Int4Block, Int8Block
from jetfire.nn.flow import StreamBlock
from jetfire.nn.recipes import Recipe


class Block(nn.Module):
    """LayerNorm → attention → add; LayerNorm → MLP → add, as torch does it.

    Args:
        linear: makes a linear layer of inputs and outputs.
    """

    def __init__(self, shape: Shape, linear: Callable[[int, int], nn.Linear]) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm1, self.norm2 = (nn.LayerNorm(width, dtype=torch.float32) for _ in range(2))
        self.qkv, self.projection = linear(width, 3 * width), linear(width, width)
        self.expand, self.contract = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        dropout = self.dropout if self.training else 0.0
        heads = (
            self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        y = self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        x = x + F.dropout(y, dropout)
        y = self.contract(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, dropout)


class GPT2(LanguageModel):
    """GPT-2, with learned positions."""

    norm: nn.LayerNorm

    @staticmethod
    def block_of(shape: Shape, recipe: Recipe) -> Block | StreamBlock:
        sizes, flow = (shape.width, shape.heads, shape.dropout), recipe.flow
        if recipe.block is not None and flow is not None:
            return Int8Block(*sizes, recipe.block, flow, kept=recipe.kept)
        if recipe.int4 is not None and flow is not None:
            return Int4Block(*sizes, recipe.int4, flow)
        return Block(shape, linear_of(recipe))

    @staticmethod
    def norm_of(width: int) -> nn.LayerNorm:
        return nn.LayerNorm(width, dtype=torch.float32)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (p.to(x.dtype) for p in (self.norm.weight, self.norm.bias))
        return F.layer_norm(x, self.norm.normalized_shape, weight, bias, self.norm.eps)
