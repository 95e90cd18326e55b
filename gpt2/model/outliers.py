"""Outliers that a model is begun with: what recipes make of them is then seen in a short run."""

from __future__ import annotations

import torch

from jetfire.gpt2.model.language_model import LanguageModel

CHANNELS = 4  # of each MLP, evenly apart
# What the MLP's activation is taken of: Llama's gate and GPT-2's first layer.
_ACTIVATED = ("gate.weight", "expand.weight")
_FREEDOM = 3  # degrees of it, of Student's t: the fewest with a variance
_DEVIATION = 0.02


@torch.no_grad()
def plant(model: LanguageModel, factor: float) -> None:
    """Make outliers as trained models have them (arXiv 2503.08040), in place.

    A few channels of each MLP are `factor` times as large before its activation. Embeddings are
    drawn anew by Student's t, of the deviation that they had: one in 300 is beyond 5 times that.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(_ACTIVATED):
            parameter[:: len(parameter) // CHANNELS][:CHANNELS] *= factor
    table = model.tokens.weight
    normal = torch.randn(_FREEDOM, *table.shape, dtype=table.dtype, device=table.device)
    heavy = torch.randn_like(table) / normal.square().mean(0).sqrt()
    table.copy_(heavy * (_DEVIATION / (_FREEDOM / (_FREEDOM - 2)) ** 0.5))
