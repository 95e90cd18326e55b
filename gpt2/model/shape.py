"""The sizes of a GPT-2, their bounds, and what follows from them; no torch is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from jetfire.core.errors import UsageError
from jetfire.gpt2.data.vocabulary import Vocabulary

# Far above what anyone trains, and far below what would take hours to refuse.
Depth = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=1 << 16)]
Context = Annotated[int, Field(ge=1, le=1 << 20)]
Dropout = Annotated[float, Field(ge=0, le=0.999)]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

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

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocabulary // 64) * 64

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of one token, without recomputation, whatever the recipe.

        Products are 6 for each weight that multiplies, the tied head's included, and for attention
        12·layers·width·context (Chowdhery et al., 2022, appendix B).
        """
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.context

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, but of an INT4 recipe's steps."""
        width = self.width
        found: dict[str, tuple[int, ...]] = {
            "tokens.weight": (self.rows, width),
            "positions.weight": (self.context, width),
            "norm.weight": (width,),
            "norm.bias": (width,),
        }
        linears = {
            "qkv": (3 * width, width),
            "projection": (width, width),
            "expand": (4 * width, width),
            "contract": (width, 4 * width),
        }
        for block in (f"blocks.{i}" for i in range(self.layers)):
            for name in ("norm1", "norm2"):
                found |= {f"{block}.{name}.{part}": (width,) for part in ("weight", "bias")}
            for name, size in linears.items():
                found |= {f"{block}.{name}.weight": size, f"{block}.{name}.bias": size[:1]}
        return found


def check_heads(width: int, heads: int) -> None:
    """Refuse a width that so many heads do not divide."""
    if width % heads:
        raise UsageError(f"width={width}: expected a multiple of heads={heads}")
