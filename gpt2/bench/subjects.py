"""What the training bench measures: a whole optimizer step, or one transformer block.

Each variant is a subject that stays alive on the device while the others are measured: the recipes
in INT8 and INT4, and as peers torch's own modules under BF16 autocast (`cases.TorchVariant`), with
the same fp32 parameters and the same optimizer, where the case names no other for the recipes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from jetfire.core.errors import UsageError, not_installed
from jetfire.core.tensors import Tensors
from jetfire.gpt2.bench.cases import (
    PEERS,
    BlockProblem,
    StepProblem,
    TorchVariant,
    TrainingCase,
)
from jetfire.gpt2.model.families import block_of, model_of
from jetfire.gpt2.model.language_model import LanguageModel
from jetfire.gpt2.training.graph import Advance, graphed
from jetfire.gpt2.training.step import Micro, Step, autocast
from jetfire.nn import Int8Block, Int8LlamaBlock, Stream, recipes, weights_changed
from jetfire.nn.captured import LAUNCHED, beside, captured
from jetfire.nn.flow import StreamBlock

RATE = 1e-4  # of the timed steps: all of one batch, whose loss must fall
_NEXT = 0.1  # from one step to the next a loss moves by less than this part of the first one
_DRAWS = 0.2  # two calls, of other draws and orders of sums, differ by less of a gradient


class RecipeError(UsageError):
    """A model has nothing to which a recipe applies."""


class Subject(ABC):
    """One variant of a problem.

    Attributes:
        model, optimizer: what is trained; a block has no optimizer.
        captures: whether it can be one CUDA graph.
        counts: whether torch's allocator counts what a call holds; in a CUDA graph it does not.
        replays: whether a call replays a CUDA graph.
    """

    captures = True
    counts = True
    replays = False
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loss = 0.0  # of the first call

    @abstractmethod
    def first(self) -> Tensors:
        """The first call: its outputs and gradients, to compare with another's."""

    @abstractmethod
    def call(self) -> object:
        """What is timed."""

    @abstractmethod
    def accumulate(self) -> object:
        """Forward and backward that add to the gradients of the call before."""

    def forget(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def standing(self) -> Iterable[torch.Tensor]:
        """Parameters, gradients and optimizer state."""
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            if self.optimizer is not None and parameter in self.optimizer.state:
                state = self.optimizer.state[parameter].values()
                yield from (value for value in state if isinstance(value, torch.Tensor))

    def capture(self) -> Callable[[], object]:
        """The call as one CUDA graph."""
        raise NotImplementedError("it is run as torch runs it")

    def risen(self, loss: float) -> str:
        """What is wrong where the loss of the one batch has not fallen; empty if nothing is."""
        if loss < self.loss:
            return ""
        return f"the loss of the one batch went from {self.loss:.4f} to {loss:.4f}"

    def fault(self) -> str:
        """What is wrong after all the calls; empty if nothing is."""
        return ""


def in_fp8(
    module: nn.Module, recipe: str, chosen: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Have torchao train a module's linear layers in FP8, as its users do, in place.

    Args:
        chosen: of a layer and its name, whether it is one of them; None for all.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise not_installed("torchao") from None
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(module, module_filter_fn=chosen, config=config)


def _gradients(module: nn.Module, last: int) -> Tensors:
    """Copies of the gradients of the matrices outside the blocks, of the first and the last one."""
    ends = tuple(f"blocks.{i}." for i in (0, last))
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
        and parameter.dim() == 2
        and (name.startswith(ends) or not name.startswith("blocks."))
    }


class StepSubject(Subject):
    """A model with its optimizer.

    Args:
        name: a recipe or a peer.
        micros: the batches of every step.
        state: `cases.STATE` settings of a recipe.
    """

    def __init__(
        self,
        problem: StepProblem,
        name: str,
        micros: list[Micro],
        device: torch.device,
        seed: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        # A recipe's own step is launched as it is, and its loss is its own.
        peer = PEERS.get(name, TorchVariant(name, compiled=False))
        recipe = "bf16" if name in PEERS else name
        own: Mapping[str, Any] = {} if name in PEERS else state or {}
        chosen = problem.run(
            recipe=recipe, compile=peer.compiled, accumulate=problem.accumulate, **own
        )
        torch.manual_seed(seed)  # the same parameters for every recipe
        with device:
            self.model: LanguageModel = model_of(
                problem.shape, chosen.precision, peer.own_loss or None
            )
        if peer.fp8 is not None:
            in_fp8(self.model.blocks, peer.fp8)
        self.step = Step(self.model, chosen, device)
        self.step.set_rate(RATE)
        self.optimizer = self.step.optimizer
        self.micros = micros
        # Capturing a compiled step fails (torch 2.11), and leaves torch's generator of no use.
        self.captures = not peer.compiled
        self.graphed: Advance | None = None

    def first(self) -> Tensors:
        self.forget()
        loss = torch.zeros((), dtype=torch.float32, device=self.step.device)
        for ids, targets in self.micros:
            loss += self.step.gradient(ids, targets)
        # The update divides gradients by the clipping's factor: copy them before it.
        found = {"loss": loss, **_gradients(self.model, len(self.model.blocks) - 1)}
        self.step.update(loss)
        self.loss = float(loss)
        return found

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step(self.micros)

    def accumulate(self) -> object:
        return self.step.gradient(*self.micros[0])

    def capture(self) -> Callable[[], object]:
        self.graphed = graphed(self.step)
        for _ in range(LAUNCHED + 1):
            self.graphed(self.micros)
        return self._replay

    def _replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.graphed is not None
        return self.graphed(self.micros)

    def fault(self) -> str:
        """The loss must have fallen, and the graph must find the same."""
        loss = float(self.call()[0])
        if risen := self.risen(loss):
            return risen
        graphs = loss if self.graphed is None else float(self._replay()[0])
        if not abs(graphs - loss) < _NEXT * self.loss:
            return f"the loss is {loss:.4f}, and {graphs:.4f} in the CUDA graph"
        return ""


class BlockSubject(Subject):
    """A block whose weights are quantised (or cast) in each call.

    All calls run on one stream, that of a CUDA graph too (`jetfire.nn.captured.beside`).

    Args:
        name: a recipe or a peer.
        x, dy: bf16, batch×context×width: the input and the output's gradient.
    """

    def __init__(
        self, problem: BlockProblem, name: str, x: torch.Tensor, dy: torch.Tensor, seed: int
    ) -> None:
        self.recipe = recipes.get("bf16" if name in PEERS else name)
        self.x, self.dy = x.detach().requires_grad_(), dy
        torch.manual_seed(seed)  # the same parameters for every recipe
        with x.device:
            self.model = block_of(problem.shape, self.recipe)
        if isinstance(self.model, Int8Block | Int8LlamaBlock):
            self.model.adds_gradients = True  # as a `Step` has it
        peer = PEERS.get(name, TorchVariant(name, compiled=False))
        if peer.fp8 is not None:
            in_fp8(self.model, peer.fp8)
        self.forward = torch.compile(self.model) if peer.compiled else self.model
        self.stream = torch.cuda.Stream(x.device) if x.is_cuda else None
        self.wrong = ""

    def _on_own_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else beside(self.stream)

    def _outputs(self) -> torch.Tensor:
        x = self.x
        if not self.recipe.plain:
            weights_changed()
        if not isinstance(self.model, StreamBlock):
            with autocast(x.device):
                return self.forward(x if x.is_cuda else x.float())
        stream = self.forward(Stream.of(x.flatten(0, 1), self.model.flow), x.shape[0])
        return stream.x.view(x.shape)

    def first(self) -> Tensors:
        with self._on_own_stream():
            y = self._outputs()
            y.backward(self.dy.to(y.dtype))
        assert self.x.grad is not None
        # Of the branches alone: what the residual stream passes on would hide their errors.
        return {
            "y − x": y.detach() - self.x.detach(),
            "dx − dy": self.x.grad - self.dy,
            **_gradients(self.model, 0),
        }

    def call(self) -> object:
        self.forget()
        return self.accumulate()

    def forget(self) -> None:
        super().forget()
        self.x.grad = None

    def accumulate(self) -> object:
        with self._on_own_stream():
            self._forward_backward()
        return None

    def _forward_backward(self) -> None:
        """Return nothing: timers hold results, and y all that backward needs."""
        y = self._outputs()
        y.backward(self.dy.to(y.dtype))

    def standing(self) -> Iterable[torch.Tensor]:
        yield from super().standing()
        if self.x.grad is not None:  # the input is no more this block's than the one's before
            yield self.x.grad

    def capture(self) -> Callable[[], object]:
        torch.manual_seed(0)
        self.call()
        expected = self._gradient().clone()
        self.forget()
        assert self.stream is not None
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self.stream):
            self._forward_backward()
        torch.manual_seed(0)  # which draws the same rows in 4 bits
        graph.replay()
        error = float((self._gradient() - expected).norm() / expected.norm())
        if not error < _DRAWS:
            self.wrong = f"{self._last}: relative error {error:.2g} in the CUDA graph"
        return graph.replay

    @property
    def _last(self) -> str:
        """The weight whose gradient backward finds last: it holds the faults of everything before.

        In 4 bits, the last that is the same each time: attention's backward adds in any order, and
        of a gradient that differs in its last bits other rows are drawn.
        """
        if self.recipe.int4 is not None:
            return "projection.weight"
        return "qkv.weight" if hasattr(self.model, "qkv") else "value.weight"

    def _gradient(self) -> torch.Tensor:
        found = self.model.get_parameter(self._last).grad
        assert found is not None
        return found

    def fault(self) -> str:
        self.call()
        finite = bool(torch.isfinite(self._gradient()).all())
        return self.wrong or ("" if finite else f"{self._last}: its gradient is not finite")


def maker(
    case: TrainingCase, device: torch.device, seed: int
) -> Callable[[str], Callable[[], Subject]]:
    """Return what makes a case's variant of a name; all have the same data."""
    problem = case.problem
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(problem, StepProblem):
        shape = (2, problem.accumulate, problem.batch, problem.context)
        ids = torch.randint(problem.vocabulary, shape, device=device, generator=generator)
        micros: list[Micro] = list(zip(*ids, strict=True))
        return lambda name: partial(StepSubject, problem, name, micros, device, seed, case.state)
    size = (2, problem.batch, problem.context, problem.width)
    values = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
    x, dy = values.bfloat16()
    return lambda name: partial(BlockSubject, problem, name, x, dy, seed)


@dataclass(frozen=True)
class Probe:
    """What was found of a subject before it is timed.

    Attributes:
        outputs: of its first call.
        first_s: seconds that call took, compiling included.
        peak: bytes at the peak of a call; activation: those beyond parameters, gradients and
            optimizer state, where gradients stand from the start (as in a second micro-batch: else
            those not yet there would be subtracted from what is). None on the CPU, and where the
            subject does not count it.
    """

    outputs: Tensors
    first_s: float
    peak: int | None = None
    activation: int | None = None


def probe(make: Callable[[], Subject], device: torch.device) -> tuple[Subject, Probe]:
    """Make a subject, and measure its memory in eager calls; others alive do not count."""
    base = _allocated(device)
    subject = make()
    _synchronise(device)
    begin = time.perf_counter()
    outputs = subject.first()
    _synchronise(device)
    first_s = time.perf_counter() - begin
    if device.type != "cuda" or not subject.counts:
        return subject, Probe(outputs, first_s)
    base += _bytes(outputs.values())
    subject.call()
    peak = _peak(subject.call, device) - base
    activation = _peak(subject.accumulate, device) - base - _bytes(subject.standing())
    subject.forget()
    return subject, Probe(outputs, first_s, peak, activation)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    # cuBLAS's workspace is nobody's.
    torch.ones((64, 64), device=device, dtype=torch.bfloat16).mm(
        torch.ones((64, 64), device=device, dtype=torch.bfloat16)
    )
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _peak(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
