"""One training step of any model: forward under autocast, backward, fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from jetfire.core.errors import UsageError
from jetfire.models.sources import Batch


def loss_of(
    forward: Callable[..., Any], batch: Batch, cast: AbstractContextManager[Any]
) -> torch.Tensor:
    """Return the loss of a batch, a scalar.

    Args:
        forward: the model, or the model compiled.
        batch: as `jetfire.models.sources.FunctionSource` has it.
        cast: within which it is computed, such as autocast to BF16.

    Raises:
        UsageError: what comes of it is no loss.
    """
    with cast:
        if isinstance(batch, Mapping):
            found = forward(**batch)
        elif isinstance(batch, list | tuple):
            found = forward(*batch)
        else:
            found = forward(batch) if isinstance(batch, torch.Tensor) else batch(forward)
    if isinstance(found, Mapping):
        found = found.get("loss", found)
    elif isinstance(found, tuple) and found:
        found = found[0]
    loss = getattr(found, "loss", found)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise UsageError(
            f"the model returned {type(loss).__name__}{shape}: expected a loss, a "
            "scalar tensor, or what has it as its loss"
        )
    return loss.reshape(())


def without_dropout(model: nn.Module) -> None:
    """Have a model drop nothing, in place: gradients could not be compared.

    Modules that drop by themselves have torch's Dropout, or a number `attention_dropout`.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 (no torch.nn.Module declares it)
