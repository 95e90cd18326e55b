"""The linear layers of a model, as one of its steps calls them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from jetfire.core.errors import JetfireError, UsageError, first_line
from jetfire.gpt2.training.step import autocast
from jetfire.models.sources import Batch, ModelSource
from jetfire.models.step import loss_of, without_dropout
from jetfire.nn import convert

CPU = torch.device("cpu")
_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer: y (m×n) = x (m×k) · Wᵀ (W n×k), and its two gradients.

    Attributes:
        name: the module's in the model.
        m: rows of its input in one call: tokens.
        n, k: features of its output and of its input.
        transposed: its parameter is stored k×n.
        calls: how often a step calls it.
        kept: why `jetfire.nn.convert` leaves it; empty where it replaces it.
    """

    name: str
    m: int
    n: int
    k: int
    bias: bool
    transposed: bool = False
    calls: int = 1
    kept: str = ""

    @property
    def flops(self) -> float:
        """Floating-point operations of its three products per step."""
        return 6.0 * self.m * self.n * self.k * self.calls


@dataclass(frozen=True)
class Traced:
    """What is known of a model without training it.

    Attributes:
        layers: in the order in which they are first called.
        left: why `convert` leaves each other module that has a matrix, embeddings apart.
        parameters: how many numbers the model learns.
    """

    layers: tuple[LinearLayer, ...]
    left: dict[str, str]
    parameters: int

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)


def at_ends(names: Iterable[str]) -> list[str]:
    """Return the names without those in numbered modules between the first and the last."""
    found, last = list(names), dict[str, int]()
    for name in found:
        for number in _NUMBERED.finditer(name):
            head = name[: number.start()]
            last[head] = max(last.get(head, 0), int(number[1]))
    return [
        name
        for name in found
        if all(int(n[1]) in (0, last[name[: n.start()]]) for n in _NUMBERED.finditer(name))
    ]


def weight_of(module: Any) -> torch.Tensor:
    """Return a linear layer's weight, n×k; `transformers`' Conv1D has it transposed."""
    weight: torch.Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.t()


def traced(source: ModelSource) -> Traced:
    """Return a model's linear layers; only a user's own is made in memory and run, on the CPU.

    Raises:
        UsageError: there is no such model, or its step fails.
    """
    with _silent(), nullcontext() if source.own else FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = source.make(CPU)
        without_dropout(model)
        with step_of(source):
            return _traced(model, batch)


@contextmanager
def step_of(source: ModelSource) -> Iterator[None]:
    """Have what a model's step raises be one line that names the model.

    Raises:
        UsageError: it fails, but for want of memory.
    """
    try:
        yield
    except (JetfireError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):  # torch has no type for it on a CPU
            raise
        raise UsageError(f"{source.name}: its step fails: {first_line(error)}") from error


@contextmanager
def _silent() -> Iterator[None]:
    """Have torch log no traceback of an operation that fails on tensors without memory."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _traced(model: nn.Module, batch: Batch) -> Traced:
    calls: dict[str, list[int]] = {}
    with torch.no_grad(), _noted(model, calls):
        loss_of(model, batch, autocast(CPU))
    modules = {name: model.get_submodule(name) for name in calls}
    tables = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    first = convert(model)
    heads = convert(model, head=True).converted
    layers = []
    for name, rows in calls.items():
        if name in (*first.converted, *heads):
            n, k = weight_of(modules[name]).shape
            bias = getattr(modules[name], "bias", None) is not None
            transposed = not isinstance(modules[name], nn.Linear)
            why = first.left.get(name, "")
            layers.append(LinearLayer(name, rows[0], n, k, bias, transposed, len(rows), why))
    known = {*heads, *tables}
    left = {name: reason for name, reason in first.left.items() if name not in known}
    return Traced(tuple(layers), left, parameters)


@contextmanager
def _noted(model: nn.Module, calls: dict[str, list[int]]) -> Iterator[None]:
    """Have calls of modules with a matrix add the rows of their input to `calls`, by name."""

    def note(name: str, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.setdefault(name, []).append(inputs[0].numel() // inputs[0].shape[-1])

    handles = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs))
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
