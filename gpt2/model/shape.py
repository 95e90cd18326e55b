"""The sizes of a model, their bounds, and what follows from them; no torch is loaded for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jetfire.core.errors import UsageError
from jetfire.gpt2.data.vocabulary import Vocabulary
from jetfire.nn.recipes import Recipe
from jetfire.nn.sizes import check_llama

# Far above what anyone trains, and far below what would take hours to refuse.
Depth = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=1 << 16)]
Context = Annotated[int, Field(ge=1, le=1 << 20)]
Dropout = Annotated[float, Field(ge=0, le=0.999)]
# 0 stands for the family's usual size.
SomeHeads = Annotated[int, Field(ge=0, le=1024)]
Hidden = Annotated[int, Field(ge=0, le=1 << 18)]
Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2, and what other families change of it.

    Attributes:
        vocabulary: tokens; the table is padded to a multiple of 64 rows, never predicted.
        context: the longest sequence.
        dropout: probability, of embeddings, attention's weights and both branches' outputs.
    """

    layers: Depth
    heads: Depth
    width: Width
    context: Context
    vocabulary: Vocabulary
    dropout: Dropout = 0.0

    family: ClassVar[Family] = "gpt2"
    # What each norm and linear layer of a block has, and which sizes their inputs have.
    parts: ClassVar[tuple[str, ...]] = ("weight", "bias")
    inputs: ClassVar[tuple[str, ...]] = ("width",)

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocabulary // 64) * 64

    @property
    def block_weights(self) -> int:
        """Weights of all blocks that multiply each token."""
        return self.layers * sum(map(math.prod, self.linears().values()))

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of one token, without recomputation, whatever the recipe.

        Products are 6 for each weight that multiplies, the head's included, and for attention
        12·layers·width·context (Chowdhery et al., 2022, appendix B).
        """
        weights = self.block_weights + self.vocabulary * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.context

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of a block's linear layers by name."""
        width = self.width
        return {
            "qkv": (3 * width, width),
            "projection": (width, width),
            "expand": (4 * width, width),
            "contract": (width, 4 * width),
        }

    def ends(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters outside the blocks by name."""
        return {
            "tokens.weight": (self.rows, self.width),
            "positions.weight": (self.context, self.width),
            "norm.weight": (self.width,),
            "norm.bias": (self.width,),
        }

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name."""
        found = self.ends()
        for block in (f"blocks.{i}" for i in range(self.layers)):
            for norm in ("norm1", "norm2"):
                found |= {f"{block}.{norm}.{part}": (self.width,) for part in self.parts}
            for name, size in self.linears().items():
                sizes = {"weight": size, "bias": size[:1]}
                found |= {f"{block}.{name}.{part}": sizes[part] for part in self.parts}
        return found

    def check(self, recipe: Recipe) -> None:
        """Refuse sizes that do not go together, or not with a recipe."""
        self._check_heads(recipe)
        for name in self.inputs:
            size = getattr(self, name)
            reason = recipe.int4 and recipe.int4.why_not(size, size)
            if reason:
                raise UsageError(f"{name}={size}: {reason}")

    def _check_heads(self, recipe: Recipe) -> None:
        if self.width % self.heads:
            raise UsageError(f"width={self.width}: expected a multiple of heads={self.heads}")


@dataclass(frozen=True)
class LlamaShape(Shape):
    """Sizes of a Llama (Touvron et al., 2023): no biases, rotary positions, a gated MLP.

    Attributes:
        kv_heads: heads of keys and values; 0 is as many as of queries.
        hidden: width of the MLP; 0 is 8/3 of the width, rounded up to a multiple of 256.
        tied: whether the head's weight is the embedding table.
    """

    kv_heads: SomeHeads = 0
    hidden: Hidden = 0
    tied: bool = True

    family: ClassVar[Family] = "llama"
    parts: ClassVar[tuple[str, ...]] = ("weight",)
    inputs: ClassVar[tuple[str, ...]] = ("width", "hidden")

    def __post_init__(self) -> None:
        usual = {"kv_heads": self.heads, "hidden": -(-self.width * 8 // 3 // 256) * 256}
        for name, size in usual.items():
            object.__setattr__(self, name, getattr(self, name) or size)

    def linears(self) -> dict[str, tuple[int, int]]:
        width, hidden, of_kv = self.width, self.hidden, self.width // self.heads * self.kv_heads
        return {
            "query": (width, width),
            "key": (of_kv, width),
            "value": (of_kv, width),
            "projection": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
        }

    def ends(self) -> dict[str, tuple[int, ...]]:
        table = (self.rows, self.width)
        found = {"tokens.weight": table, "norm.weight": (self.width,)}
        return found if self.tied else found | {"head.weight": table}

    def _check_heads(self, recipe: Recipe) -> None:
        flows = recipe.block is not None and recipe.flow is not None  # else any size is taken
        sides = (recipe.block, recipe.flow) if flows else (1, 1)
        check_llama(self.width, self.heads, self.kv_heads, self.hidden, *sides)


SHAPES: dict[str, type[Shape]] = {kind.family: kind for kind in (Shape, LlamaShape)}
