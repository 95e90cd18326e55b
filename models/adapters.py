"""A model of which only LoRA adapters learn, on linear layers in BF16 or in INT8."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from jetfire.core.errors import not_installed
from jetfire.gpt2.bench.subjects import RecipeError
from jetfire.models.cases import ModelCase, recipe_of
from jetfire.nn import convert


def adapted(model: nn.Module, case: ModelCase, recipe: str | None) -> nn.Module:
    """Return a model with adapters (arXiv 2106.09685) of the case's rank on its linear layers.

    Whatever it has of its own is in BF16 and does not learn, as users of adapters load it. Both
    factors of an adapter are drawn from torch's generator: of one that is 0, as training begins
    with, the other would have no gradient to compare.

    Args:
        recipe: by which these layers' weights are codes alone; None leaves them in BF16.

    Raises:
        UsageError: peft is not installed.
        RecipeError: there is no layer to convert.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise not_installed("peft", "hf") from None
    model.to(torch.bfloat16)
    if recipe and not convert(model, recipe_of(recipe), frozen=True).converted:
        raise RecipeError(f"{case.source.name} has no linear layer that {recipe} converts")
    config = LoraConfig(r=case.adapters, target_modules=list(case.layers), init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of a Conv1D's layout and of transformers' names
        wrapped: nn.Module = get_peft_model(model, config)
    return wrapped
