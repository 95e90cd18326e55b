"""The families of models that are trained, by name: a `Shape` has the sizes of one, and says which.

A family is three things: a `Shape` (`jetfire.gpt2.model.shape`), a `LanguageModel` here, and a
`Layout` of the weights in files (`jetfire.gpt2.model.layouts`).
"""

from __future__ import annotations

from torch import nn

from jetfire.gpt2.model.gpt2 import GPT2
from jetfire.gpt2.model.language_model import LanguageModel
from jetfire.gpt2.model.llama import Llama
from jetfire.gpt2.model.shape import Shape
from jetfire.nn.recipes import Recipe

MODELS: dict[str, type[LanguageModel]] = {"gpt2": GPT2, "llama": Llama}


def model_of(
    shape: Shape, recipe: str | Recipe = "bf16", own_loss: bool | None = None
) -> LanguageModel:
    """Return a model of the family of its sizes, on torch's default device."""
    return MODELS[shape.family](shape, recipe, own_loss)


def block_of(shape: Shape, recipe: Recipe) -> nn.Module:
    """Return one block of such a model."""
    return MODELS[shape.family].block_of(shape, recipe)
