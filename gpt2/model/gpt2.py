"""GPT-2 (Radford et al., 2019): pre-norm transformer, tanh GELU, tied output head."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core import problem
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.model.shape import Shape, check_heads
from jetfire.nn import (
    Int4Linear,
    Int8Block,
    Stream,
    TiedGradient,
    linear_cross_entropy,
    recipes,
    tied_embedding,
)
from jetfire.nn.products import Int8Weights, QuantisedWeight
from jetfire.nn.recipes import Recipe
from jetfire.reference.cross_entropy import IGNORED


def check_fits(shape: Shape, device: Device) -> None:
    """Fail before a device is filled with what it cannot hold."""
    needed = 4 * sum(math.prod(size) for size in shape.parameters().values())
    if device.kind == "cuda":
        there = torch.cuda.get_device_properties(device.torch_device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UsageError(
            f"layers={shape.layers}, width={shape.width}, context={shape.context}: parameters take "
            f"{needed / 2**30:.0f} GiB: {device.label} has {there / 2**30:.0f}"
        )


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


def block_of(shape: Shape, recipe: Recipe) -> Block | Int8Block:
    """A block whose products are a recipe's."""
    if recipe.block is not None:
        return Int8Block(shape.width, shape.heads, shape.dropout, recipe.block, recipe.flow)
    if recipe.int4 is not None:
        return Block(shape, partial(Int4Linear, int4=recipe.int4, dtype=torch.float32))
    return Block(shape, partial(nn.Linear, dtype=torch.float32))


class GPT2(nn.Module, Int8Weights):
    """Token ids (batch×tokens) → logits, or with targets the mean loss.

    Parameters are fp32 and have the same names and shapes in every recipe, so that any checkpoint
    loads in any; INT4 recipes have those of their steps too.

    Args:
        recipe: bf16 is torch's own modules (under the caller's autocast); INT8 recipes run the
            blocks in INT8, with a `head` the output head's loss too (`own_loss`), and the rest,
            logits without targets among it, in BF16; INT4 recipes the blocks' linear layers alone,
            and the rest as bf16 does.
        own_loss: the head and its loss are `linear_cross_entropy`; None is so but of bf16.
    """

    def __init__(
        self, shape: Shape, recipe: str | Recipe = "bf16", own_loss: bool | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
        self.own_loss = not self.recipe.plain if own_loss is None else own_loss
        check_heads(shape.width, shape.heads)
        self.tokens = nn.Embedding(shape.rows, shape.width, dtype=torch.float32)
        self.positions = nn.Embedding(shape.context, shape.width, dtype=torch.float32)
        self.blocks = nn.ModuleList(block_of(shape, self.recipe) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, dtype=torch.float32)
        self._head = QuantisedWeight()
        self._initialise()

    def _initialise(self) -> None:
        """Normal, 0.02; what ends in the residual stream shrinks with the depth (section 2.3)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                depth = math.sqrt(2 * self.shape.layers) if residual else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """ids and targets int64, batch×tokens; a target of −100 does not count.

        Returns:
            Logits, batch×tokens×vocabulary; with targets, the mean loss in nats, an fp32 scalar.
        """
        if ids.dim() != 2:
            raise UsageError(f"ids of shape {tuple(ids.shape)}: expected batch×tokens")
        if ids.shape[1] > self.shape.context:
            raise UsageError(
                f"{ids.shape[1]} tokens: expected at most {self.shape.context}, the context"
            )
        # Who wants logits may do anything with them; and a compiler traces no object of ours.
        tied = None
        if self.own_loss and targets is not None:
            tied = None if torch.compiler.is_compiling() else TiedGradient()
        table = self.tokens.weight
        x = self.tokens(ids) if tied is None else tied_embedding(table, ids, tied)
        x = x + self.positions.weight[: ids.shape[1]]
        if self.training and self.shape.dropout:
            x = F.dropout(x, self.shape.dropout)
        x = self._plain(x) if self.recipe.flow is None else self._int8(x, self.recipe.flow)
        valid = self.shape.vocabulary
        if targets is None:
            return F.linear(x, table.to(x.dtype))[..., :valid]
        if not self.own_loss:
            logits = F.linear(x, table)[..., :valid]
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        side = self.recipe.head
        codes = None if side is None else self._head.of(table, side)
        rows = linear_cross_entropy(
            x.flatten(0, 1), table, targets.flatten(), valid, tied, codes, self.training
        )
        return rows.sum() / (targets != IGNORED).sum()

    def int8_weights(self) -> list[tuple[torch.Tensor, QuantisedWeight, problem.Block]]:
        """Return the table with its codes and block, where the head multiplies in INT8."""
        side = self.recipe.head
        return [(self.tokens.weight, self._head, side)] if side and self.own_loss else []

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def _int8(self, x: torch.Tensor, side: problem.Block) -> torch.Tensor:
        batch, tokens, width = x.shape
        with torch.autocast(x.device.type, enabled=False):
            stream = Stream.of(x.flatten(0, 1).to(torch.bfloat16), side)
            for block in self.blocks:
                stream = block(stream, batch)
            norm = self.norm
            weight, bias = (p.to(torch.bfloat16) for p in (norm.weight, norm.bias))
            y = F.layer_norm(stream.x, norm.normalized_shape, weight, bias, norm.eps)
        return y.view(batch, tokens, width)
