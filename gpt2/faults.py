"""Where a step went wrong: the first output of a module, or gradient, that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from jetfire.gpt2.step import Micro, autocast


class _Found(Exception):
    """Carries what was found out of a hook."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The float tensors of a module's output: one, or tuples of them."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "Inf"


def _parameter_of(module: nn.Module) -> str | None:
    """A parameter of the module that is itself at fault."""
    for name, parameter in module.named_parameters():
        if not _finite(parameter):
            return f"{name} holds {_kind(parameter)}"
    return None


def _watch_forward(stack: ExitStack, model: nn.Module) -> None:
    def check(name: str, module: nn.Module, output: Any) -> None:
        if not _finite(output):
            bad = next(t for t in _tensors(output) if not _finite(t))
            why = _parameter_of(module) or f"its output holds {_kind(bad)}"
            raise _Found(f"{name}: {why}")

    for name, module in model.named_modules():
        if name:
            hook = module.register_forward_hook(lambda m, _, out, name=name: check(name, m, out))
            stack.callback(hook.remove)


def _watch_backward(stack: ExitStack, model: nn.Module) -> None:
    def check(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not _finite(parameter.grad):
            raise _Found(f"{name}: its gradient holds {_kind(parameter.grad)}")

    for name, parameter in model.named_parameters():
        hook = parameter.register_post_accumulate_grad_hook(lambda p, name=name: check(name, p))
        stack.callback(hook.remove)


def find(model: nn.Module, micros: Sequence[Micro], device: torch.device) -> str:
    """Run a step's batches again, eagerly and watched, in the order in which the step ran them.

    The caller has put torch's generator where the step found it; parameters are left as they are.

    Returns:
        The layer and what of it is not finite, for a message.
    """
    model.zero_grad(set_to_none=True)
    try:
        with ExitStack() as stack:
            _watch_forward(stack, model)
            _watch_backward(stack, model)
            for ids, targets in micros:
                with autocast(device):
                    loss = model(ids, targets) / len(micros)
                if not _finite(loss):
                    return f"the loss, after the last block: {_parameter_of(model) or _kind(loss)}"
                loss.backward()
    except _Found as found:
        return str(found)
    finally:
        model.zero_grad(set_to_none=True)
    total = nn.utils.get_total_norm(list(model.parameters()))
    return f"no layer when it was run again (the parameters' norm is {float(total):.4g})"
