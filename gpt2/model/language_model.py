"""What the families of models share: embedding, blocks, norm, output head, and its loss."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from jetfire.core import problem
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.model.shape import Shape
from jetfire.nn import (
    Int4Linear,
    Int8Linear,
    Stream,
    TiedGradient,
    linear_cross_entropy,
    recipes,
    tied_embedding,
)
from jetfire.nn.flow import StreamBlock
from jetfire.nn.loss import mean_linear_cross_entropy
from jetfire.nn.products import Int8Weights, QuantisedWeight
from jetfire.nn.recipes import Recipe
from jetfire.reference.cross_entropy import IGNORED

# The layers whose output is added to the residual stream.
_RESIDUAL = ("projection.weight", "contract.weight", "down.weight")


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


def linear_of(recipe: Recipe) -> Callable[..., nn.Linear]:
    """Return what makes a recipe's linear layers where nothing flows between them in INT8."""
    kind: Callable[..., nn.Linear] = nn.Linear
    if recipe.int4 is not None:
        kind = partial(Int4Linear, int4=recipe.int4)
    elif recipe.block is not None:
        kind = partial(Int8Linear, block=recipe.block, fallback=recipe.fallback, kept=recipe.kept)
    return partial(kind, dtype=torch.float32)


class LanguageModel(nn.Module, Int8Weights):
    """Token ids (batch×tokens) → logits, or with targets the mean loss.

    Parameters are fp32 and have the same names and shapes in every recipe, so that any checkpoint
    loads in any. A family says what its blocks and its norm are, and its shape which parameters
    there are outside the blocks.

    Args:
        recipe: bf16 is torch's own modules (under the caller's autocast); INT8 recipes run the
            blocks in INT8, with a `head` the output head's loss too (`own_loss`), and the rest,
            logits without targets among it, in BF16; INT4 recipes the blocks' linear layers, and
            the rest as bf16 does, but for what flows between those of GPT-2's blocks.
        own_loss: the head and its loss are `linear_cross_entropy`; None is so but of bf16.
    """

    norm: nn.Module

    def __init__(
        self, shape: Shape, recipe: str | Recipe = "bf16", own_loss: bool | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
        self.own_loss = not self.recipe.plain if own_loss is None else own_loss
        shape.check(self.recipe)
        width, ends = shape.width, shape.ends()
        self.tokens = nn.Embedding(shape.rows, width, dtype=torch.float32)
        self.positions = self.head = None
        if "positions.weight" in ends:
            self.positions = nn.Embedding(shape.context, width, dtype=torch.float32)
        self.blocks = nn.ModuleList(self.block_of(shape, self.recipe) for _ in range(shape.layers))
        first = self.blocks[0]
        self.flow = first.flow if isinstance(first, StreamBlock) else None
        self.norm = self.norm_of(width)
        if "head.weight" in ends:
            self.head = nn.Linear(width, shape.rows, bias=False, dtype=torch.float32)
        self._head_codes = QuantisedWeight()
        self._initialise()

    @staticmethod
    @abstractmethod
    def block_of(shape: Shape, recipe: Recipe) -> nn.Module:
        """Return a block whose products are a recipe's."""

    @staticmethod
    @abstractmethod
    def norm_of(width: int) -> nn.Module:
        """Return the norm of the last block's output."""

    @abstractmethod
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the stream in its own dtype, without autocast."""

    def _initialise(self) -> None:
        """Normal, 0.02; what ends in the residual stream shrinks with the depth.

        That is GPT-2's (Radford et al., 2019, section 2.3), which other families take too.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                depth = math.sqrt(2 * self.shape.layers) if name.endswith(_RESIDUAL) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    @property
    def output(self) -> torch.Tensor:
        """The head's weight, rows × width: its own, or the embedding table."""
        weight: torch.Tensor = (self.head or self.tokens).weight
        return weight

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
        if self.own_loss and targets is not None and self.head is None:
            tied = None if torch.compiler.is_compiling() else TiedGradient()
        x = self.tokens(ids) if tied is None else tied_embedding(self.tokens.weight, ids, tied)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        if self.training and self.shape.dropout:
            x = F.dropout(x, self.shape.dropout)
        x = self._plain(x) if self.flow is None else self._flowed(x, self.flow)
        valid, weight = self.shape.vocabulary, self.output
        if targets is None:
            return F.linear(x, weight.to(x.dtype))[..., :valid]
        if not self.own_loss:
            logits = F.linear(x, weight)[..., :valid]
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        side = self.recipe.head
        codes = None if side is None else self._head_codes.of(weight, side)
        given = x.flatten(0, 1), weight, targets.flatten(), valid, tied
        if codes is not None and self.recipe.logits == "parts":
            return mean_linear_cross_entropy(*given, codes, self.training)
        return linear_cross_entropy(*given, codes, self.training).sum() / (targets != IGNORED).sum()

    def int8_weights(self) -> list[tuple[torch.Tensor, QuantisedWeight, problem.Block]]:
        """Return the head's weight with its codes and block, where it multiplies in INT8."""
        side = self.recipe.head
        return [(self.output, self._head_codes, side)] if side and self.own_loss else []

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.norm(x)
        return found

    def _flowed(self, x: torch.Tensor, side: problem.Block) -> torch.Tensor:
        batch, tokens, width = x.shape
        with torch.autocast(x.device.type, enabled=False):
            stream = Stream.of(x.flatten(0, 1).to(torch.bfloat16), side)
            for block in self.blocks:
                stream = block(stream, batch)
            y = self.normed(stream.x)
        return y.view(batch, tokens, width)
