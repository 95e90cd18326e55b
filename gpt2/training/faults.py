"""The place of a step's fault: the first output of a module, or gradient, that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from jetfire.gpt2.training import parallel
from jetfire.gpt2.training.parallel import ALONE, Group
from jetfire.gpt2.training.step import Micro, autocast
from jetfire.nn.products import own_part


class _Watch:
    """Remembers the first fault; all runs on, as other processes may wait for this one's part."""

    def __init__(self) -> None:
        self.micro = 0
        # Micro-batch, whether in backward, and layer: in the order in which a process meets them.
        self.first: tuple[int, bool, str] | None = None

    def found(self, backward: bool, layer: str) -> None:
        self.first = self.first or (self.micro, backward, layer)

    def forward(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        if self.first is None and not _finite(output):
            bad = next(t for t in _tensors(output) if not _finite(t))
            why = _parameter_of(module) or f"its output holds {_kind(bad)}"
            self.found(False, f"{name}: {why}")

    def backward(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not _finite(parameter.grad):
            self.found(True, f"{name}: its gradient holds {_kind(parameter.grad)}")

    def on(self, stack: ExitStack, model: nn.Module) -> None:
        """Watch the outputs of modules and the gradients of parameters."""
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(partial(self.forward, name))
                stack.callback(hook.remove)
        for name, parameter in model.named_parameters():
            hook = parameter.register_post_accumulate_grad_hook(partial(self.backward, name))
            stack.callback(hook.remove)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The float tensors of a module's output: one, or tuples of them; of a sharded one our part."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield own_part(value)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if bool(torch.isnan(own_part(tensor)).any()) else "Inf"


def _parameter_of(module: nn.Module) -> str | None:
    """A parameter of the module that is itself at fault."""
    for name, parameter in module.named_parameters():
        if not _finite(parameter):
            return f"{name} holds {_kind(parameter)}"
    return None


def find(
    model: nn.Module, micros: Sequence[Micro], device: torch.device, group: Group = ALONE
) -> str:
    """Run a step's batches again, eagerly and watched, in the order in which the step ran them.

    The caller has put torch's generator where the step found it; parameters are left as they are.

    Returns:
        The layer and what of it is not finite, for a message: the same in every process.
    """
    model.zero_grad(set_to_none=True)
    watch = _Watch()
    with ExitStack() as stack:
        watch.on(stack, model)
        stack.callback(model.zero_grad, set_to_none=True)
        for watch.micro, (ids, targets) in enumerate(micros):
            with autocast(device):
                loss = model(ids, targets) / len(micros)
            if not _finite(loss):
                why = _parameter_of(model) or _kind(loss)
                watch.found(False, f"the loss, after the last block: {why}")
            loss.backward()
            if group.any(watch.first is not None):
                break
    faults = [fault for fault in group.gather(watch.first) if fault is not None]
    if faults:
        return min(faults, key=lambda fault: fault[:2])[-1]
    total = parallel.norm(list(model.parameters()), group)
    return f"no layer when it was run again (the parameters' norm is {float(total):.4g})"
