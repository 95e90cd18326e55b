"""A training step of any model, in BF16 or FP8 by torch and torchao, or converted to a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from jetfire.gpt2.bench.subjects import RATE, RecipeError, Subject, Tensors, in_fp8
from jetfire.gpt2.model.tensors import whole
from jetfire.gpt2.training.step import autocast
from jetfire.measure.peers import COMPILES
from jetfire.models.adapters import adapted
from jetfire.models.cases import FUSED, PEERS, RUNS, ModelCase, recipe_of
from jetfire.models.layers import at_ends, weight_of
from jetfire.models.step import loss_of, without_dropout
from jetfire.nn import AdamW, CapturedStep, convert
from jetfire.nn.captured import LAUNCHED
from jetfire.nn.conversion import attend_causally


class ModelSubject(Subject):
    """A model with its optimizer, and the one batch of all its steps.

    Args:
        name: a recipe or a peer.

    Raises:
        RecipeError: there is no linear layer to convert, or no block to fuse.
    """

    captures = False  # a step is run as torch runs it

    def __init__(self, case: ModelCase, name: str, device: torch.device, seed: int) -> None:
        self.device = device
        self.recipe = "" if name in PEERS else name
        self.variant = PEERS.get(name, RUNS[case.run])
        self.replays = self.variant.captured
        self.counts = self.variant.mode is None and not self.replays
        case.source.load()
        torch.manual_seed(seed)  # the same parameters and batch for every variant
        self.model, self.batch = case.source.make(device)
        without_dropout(self.model)
        if case.adapters:
            self.model = adapted(self.model, case, name if self.recipe else None)
        elif self.recipe:
            _convert(self.model, name, case.source.name)
        if self.variant.fp8 is not None:
            with_linear_in_fp8(self.model, self.variant.fp8, case.layers)
        if self.variant.causal:
            attend_causally(self.model)
        if self.variant.compiled:
            # Beyond its limit Dynamo runs eagerly, and says little: variants share their code.
            config = torch._dynamo.config
            config.recompile_limit = max(COMPILES, config.recompile_limit)
        self.forward = self._prepared()
        self.optimizer: torch.optim.AdamW = self._optimizer()
        self.captured = CapturedStep(self._step, self.optimizer) if self.replays else None

    def _prepared(self) -> Callable[..., object]:
        """Return what is called for the loss; where parameters are replaced, it is done here."""
        if self.variant.compiled:
            return torch.compile(self.model, mode=self.variant.mode)
        return self.model

    def _optimizer(self) -> torch.optim.AdamW:
        """Return a fused AdamW: ours, which also quantises weights, where nothing is compiled."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": RATE, "capturable": self.replays}
        if self.variant.compiled:
            return torch.optim.AdamW(parameters, fused=True, **options)
        return AdamW(parameters, model=self.model, **options)

    def _cast(self) -> AbstractContextManager[Any]:
        """Return that within which forward runs."""
        return autocast(self.device)

    def _of_all(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the losses of all processes: there is one process."""
        return loss

    def _gradient(self) -> torch.Tensor:
        """Add the batch's gradient to what is there; return the loss."""
        if self.variant.mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(self.forward, self.batch, self._cast())
        loss.backward()
        return loss.detach().clone()  # of a CUDA graph's own memory, which the next call takes

    def first(self) -> Tensors:
        """Return the first step's loss and gradients; capture what is to be, after some more."""
        with self.captured.beside() if self.captured else nullcontext():
            loss = self._of_all(self._gradient())
            found = {"loss": loss, **_gradients(self.model)}
            self.optimizer.step()
        self.loss = float(loss)
        for _ in range(LAUNCHED + 1 if self.captured else 0):
            self.call()
        return found

    def call(self) -> torch.Tensor:
        loss: torch.Tensor = (self.captured or self._step)()
        return loss

    def _step(self) -> torch.Tensor:
        self.forget()
        loss = self._gradient()
        self.optimizer.step()
        return loss

    def accumulate(self) -> object:
        return self._gradient()

    def fault(self) -> str:
        """Return what is wrong where the loss has not fallen; else nothing."""
        return self.risen(float(self._of_all(self.call())))


def _convert(model: nn.Module, name: str, whose: str) -> None:
    """Convert a model to a recipe, and fuse its blocks where the name says so.

    Raises:
        RecipeError: it has no such layer, or no such block.
    """
    fused = name.endswith(FUSED)
    report = convert(model, recipe_of(name), fused=fused)
    if not report.converted:
        raise RecipeError(f"{whose} has no linear layer that {name} converts")
    if fused and not report.fused:
        reason = next(iter(report.single.values()), "it has none of transformers' blocks")
        raise RecipeError(f"{whose} with {name}: no block is fused: {reason}")


def _gradients(model: nn.Module) -> Tensors:
    """Return copies of matrices' gradients: of numbered modules of the first and the last alone."""
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.dim() == 2
    }
    return {name: whole(found[name]).clone() for name in at_ends(found)}


def with_linear_in_fp8(model: nn.Module, recipe: str, layers: Iterable[str]) -> None:
    """Have torchao train in FP8 the layers that a recipe of ours would replace, in place.

    Transformers' Conv1D, which torchao leaves, becomes a linear layer first. Layers whose sizes are
    no multiples of 16 stay in BF16: FP8 products take no others.

    Raises:
        UsageError: torchao is not installed.
    """
    chosen = set()
    for name in layers:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            module = _as_linear(module)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module)
        if not (module.in_features % 16 or module.out_features % 16):
            chosen.add(name)
    in_fp8(model, recipe, lambda _, name: name in chosen)


def _as_linear(conv1d: nn.Module) -> nn.Linear:
    """Return a linear layer with copies of a Conv1D's parameters."""
    weight = weight_of(conv1d)
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight.detach().contiguous())
    made.bias = nn.Parameter(conv1d.get_parameter("bias").detach().clone())
    return made
