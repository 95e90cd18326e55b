"""What a run trains: the model and its step, what checkpoints keep of them, each step's data."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.terminal import note
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.data.prepared import TokenDigests
from jetfire.gpt2.model import weights
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.model.language_model import LanguageModel, check_fits
from jetfire.gpt2.model.outliers import plant
from jetfire.gpt2.training import checkpoint, graph, parallel, utilisation
from jetfire.gpt2.training.checkpoint import MODEL, Best, Checkpoint, State
from jetfire.gpt2.training.log import Record
from jetfire.gpt2.training.parallel import ALONE, Group
from jetfire.gpt2.training.runs import Run
from jetfire.gpt2.training.settings import Settings
from jetfire.gpt2.training.step import Micro, Step, autocast


def build(settings: Settings, vocabulary: int, device: Device) -> LanguageModel:
    """A model initialised from the seed, the same for every recipe on a device.

    Raises:
        UsageError: the device has less memory than its parameters take.
    """
    shape = settings.shape(vocabulary)
    check_fits(shape, device)
    torch.manual_seed(settings.seed)
    with device.torch_device:
        model = model_of(shape, settings.precision)
        if settings.outliers:
            plant(model, settings.outliers)
    return model


class Clock:
    """Moments on a device's own time line; on the CPU, on the host's."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.at = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def ms_since(self, earlier: Clock) -> float:
        """Wait for this moment, and return the milliseconds since an earlier one."""
        if self.event is None or earlier.event is None:
            return (self.at - earlier.at) * 1e3
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event)


class Trained:
    """A run's model with all that its training reads and changes.

    Args:
        folder: where checkpoints go; None keeps none.
        report: gets the log's records as they come.
        group: the processes that train together; each has its own, and all call its methods.

    Attributes:
        graphed: whether steps are replayed as CUDA graphs.
        done: the last step whose outcome is known to be good.
        best: ``{"step", "loss"}`` of the lowest evaluation so far.
    """

    def __init__(
        self,
        settings: Settings,
        tokens: data.Tokens,
        device: Device,
        folder: Path | None,
        report: Callable[[Record], None],
        group: Group = ALONE,
    ) -> None:
        self.settings, self.tokens, self.folder, self.report = settings, tokens, folder, report
        self.device, self.group = device.torch_device, group
        self.vocabulary = tokens.vocabulary
        self.model = build(settings, self.vocabulary, device)
        self.graphed = graph.used(settings, self.device)
        self.step = Step(
            self.model, settings, self.device, group, split=graph.split(settings, self.device)
        )
        self.advance = graph.graphed(self.step) if self.graphed else self.step
        self.peak = utilisation.peak(device)
        self.flops = self.model.shape.flops_per_token
        self.done = 0
        self.best: Best | None = None

    @property
    def tokens_per_step(self) -> int:
        one = self.settings
        return one.batch * one.context * one.accumulate * self.group.world

    @property
    def tokens_seen(self) -> TokenDigests:
        """Return counts and digests of the tokens, which a run that goes on must find the same."""
        return {
            "train": len(self.tokens.train),
            "validation": len(self.tokens.validation),
            "sha256": self.tokens.meta["sha256"],
        }

    def load(self, run: Run) -> None:
        """Take the parameters that a run begins with, and all else where it goes on."""
        if run.saved is not None:
            kept = run.saved.state.get("tokens")
            if kept != self.tokens_seen:
                raise UsageError(
                    f"data {run.settings.data}: {self.tokens_seen}: {run.folder} was begun with "
                    f"{kept}; --resume needs the same tokens"
                )
            self.restore(run.saved)
        elif run.init is not None:
            saved = checkpoint.find(run.init, (MODEL,))
            if saved is not None:
                saved.load(self.model)
            else:
                weights.load(self.model, run.init)
            if self.group.leads:
                note(f"initialised from {run.init if saved is None else saved.path}")

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint."""
        saved.load(self.model, self.step.optimizer)
        self.done, self.best = saved.step, saved.state.get("best")

    def save(self) -> None:
        """Write a checkpoint, unless the tokens are no longer those that the run began with."""
        assert self.folder is not None
        self.group.each(self.tokens.check_untouched)
        checkpoint.save(self.folder, self.state(), self.model, self.step.optimizer, self.group)

    def state(self) -> State:
        """What a checkpoint holds beside tensors."""
        return {
            "step": self.done,
            "settings": self.settings.as_dict(),
            "processes": self.group.world,
            "vocabulary": self.vocabulary,
            "shape": self.model.shape,
            "tokens": self.tokens_seen,
            "best": self.best,
        }

    def micros(self, step: int) -> list[Micro]:
        """This process's micro-batches of a step, a function of the seed and the step.

        They are dealt out: any number of processes trains on the same ones together.
        """
        one, tokens, group = self.settings, self.tokens.train, self.group
        count = one.accumulate * group.world
        place: dict[str, Any] = {"seed": one.seed, "device": self.device}
        found = []
        for micro in range(group.rank, count, group.world):
            if one.order == "drawn":
                new = data.batch(tokens, one.context, one.batch, step=step, micro=micro, **place)
            else:
                first = ((step - 1) * count + micro) * one.batch
                new = data.shuffled(tokens, one.context, one.batch, first=first, **place)
            found.append(new)
        return found

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats over fixed windows of the validation tokens, the same for all runs."""
        one, group = self.settings, self.group
        self.model.eval()
        windows = data.evaluation(
            self.tokens.validation, one.context, one.batch, one.evaluate_batches, device=self.device
        )
        losses = torch.zeros(one.evaluate_batches, dtype=torch.float32, device=self.device)
        ids = targets = torch.empty(0, dtype=torch.int64, device=self.device)
        for number, (ids, targets) in enumerate(windows):
            if number % group.world == group.rank:
                losses[number] = self._loss(ids, targets)
        if 0 < one.evaluate_batches % group.world <= group.rank:
            self._loss(ids, targets)  # a sharded model runs on all processes or on none
        parallel.reshard(self.model)
        self.model.train()
        return float(group.add(losses).mean())

    def _loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast(self.device):
            loss: torch.Tensor = self.model(ids, targets)
        return loss
