"""GPT-2 (Radford et al., 2019): pre-norm transformer, tanh GELU, tied output head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Preset:
    """Sizes of a model and of a step.

    Attributes:
        context: tokens in a sequence; batch: sequences in a step.
        rate: peak learning rate.
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    batch: int = 8
    vocabulary: int = 256
    rate: float = 6e-4


PRESETS = {
    "tiny": Preset(layers=2, heads=4, width=128, context=64, batch=16, rate=1e-3),
    "gpt2-124m": Preset(layers=12, heads=12, width=768),
    "gpt2-350m": Preset(layers=24, heads=16, width=1024, rate=3e-4),
    "gpt2-774m": Preset(layers=36, heads=20, width=1280, rate=2.5e-4),
    "gpt2-1558m": Preset(layers=48, heads=25, width=1600, rate=2e-4),
}


class Block(nn.Module):
    """LayerNorm → attention → add; LayerNorm → MLP → add."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.heads = preset.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = (
            self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Token ids (batch×tokens) → logits (batch×tokens×vocabulary)."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(preset.vocabulary, preset.width)
        self.positions = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset) for _ in range(preset.layers))
        self.norm = nn.LayerNorm(preset.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                depth = math.sqrt(2 * preset.layers) if residual else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
