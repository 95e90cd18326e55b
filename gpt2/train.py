"""The training loop: steps, evaluations, checkpoints, and what a step says of itself.

Losses are read one step late, while the next is under way, so that a GPU never waits for the host.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.errors import Interrupted, JetfireError, UsageError
from jetfire.gpt2 import checkpoint, data, faults, graph, parallel, utilisation
from jetfire.gpt2.checkpoint import Best, Checkpoint, Seen, State
from jetfire.gpt2.graph import GraphedStep
from jetfire.gpt2.model import GPT2, Shape
from jetfire.gpt2.parallel import ALONE, Group
from jetfire.gpt2.settings import Settings
from jetfire.gpt2.step import Micro, Step, autocast, seed_step

Record = dict[str, Any]


@contextmanager
def algorithms(settings: Settings) -> Iterator[None]:
    """Where asked for, only those that give the same bits again."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor would cost a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def shape_of(settings: Settings, vocabulary: int) -> Shape:
    return Shape(
        layers=settings.layers,
        heads=settings.heads,
        width=settings.width,
        context=settings.context,
        vocabulary=vocabulary,
        dropout=settings.dropout,
    )


def build(settings: Settings, vocabulary: int, device: Device) -> GPT2:
    """A model initialised from the seed, the same for every recipe on a device.

    Raises:
        UsageError: the device has less memory than its parameters take.
    """
    shape = shape_of(settings, vocabulary)
    check_fits(shape, device)
    torch.manual_seed(settings.seed)
    with device.torch_device:
        return GPT2(shape, settings.precision())


def check_fits(shape: Shape, device: Device) -> None:
    """Fail before a device is filled with what it cannot hold.

    Raises:
        UsageError: it has less memory than the parameters take in fp32.
    """
    needed = 4 * sum(math.prod(size) for size in shape.parameters().values())
    if device.kind == "cuda":
        there = torch.cuda.get_device_properties(device.torch_device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UsageError(
            f"layers={shape.layers}, width={shape.width}, context={shape.context}: parameters take "
            f"{needed / 2**30:.0f} GiB: {device.label} has {there / 2**30:.0f}"
        )


class Clock:
    """Moments on a device's own time line; on the CPU, on the host's."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.at = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def ms_since(self, earlier: Clock) -> float:
        """Waits for this moment."""
        if self.event is None or earlier.event is None:
            return (self.at - earlier.at) * 1e3
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event)


@dataclass
class Launched:
    """A step that the device may still be at; `values` (loss, norm) are there when `end` is."""

    step: int
    rate: float
    values: torch.Tensor
    begin: Clock
    end: Clock


class Training:
    """One run under way.

    Args:
        folder: where checkpoints go; None keeps none.
        report: gets the log's records as they come.
        group: the processes that train together; each has a `Training`, and all call its methods.

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
        parallel.check(settings, group)
        self.vocabulary = tokens.vocabulary
        self.model = build(settings, self.vocabulary, device)
        self.graphed = graph.used(settings, self.device)
        self.step = Step(self.model, settings, self.device, group, split=self.graphed)
        self.advance = GraphedStep(self.step) if self.graphed else self.step
        self.peak = utilisation.peak(device)
        self.flops = utilisation.flops_per_token(settings, self.vocabulary)
        self.done = 0
        self.best: Best | None = None

    @property
    def tokens_per_step(self) -> int:
        one = self.settings
        return one.batch * one.context * one.accumulate * self.group.world

    @property
    def tokens_seen(self) -> Seen:
        """What tells the data from other data."""
        return {
            "train": len(self.tokens.train),
            "validation": len(self.tokens.validation),
            "sha256": self.tokens.meta["sha256"],
        }

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint."""
        self.initialise(saved.model(), saved.path)
        checkpoint.load_optimizer(self.model, self.step.optimizer, saved.optimizer())
        self.done, self.best = saved.step, saved.state.get("best")

    def initialise(self, parameters: dict[str, torch.Tensor], where: Path) -> None:
        checkpoint.load_model(self.model, parameters, where)

    def micros(self, step: int) -> list[Micro]:
        """This process's micro-batches of a step, a function of the seed and the step.

        They are dealt out: any number of processes trains on the same ones together.
        """
        one, group = self.settings, self.group
        count = one.accumulate * group.world
        return [self._micro(step, micro, count) for micro in range(group.rank, count, group.world)]

    def _micro(self, step: int, micro: int, count: int) -> Micro:
        """Return one of the micro-batches of a step, which has so many."""
        one, tokens = self.settings, self.tokens.train
        if one.order == "drawn":
            return data.batch(
                tokens,
                one.context,
                one.batch,
                seed=one.seed,
                step=step,
                micro=micro,
                device=self.device,
            )
        first = ((step - 1) * count + micro) * one.batch
        return data.shuffled(
            tokens, one.context, one.batch, seed=one.seed, first=first, device=self.device
        )

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the last step.

        Raises:
            JetfireError: a loss or a gradient was not finite; names the step and the layer.
            Interrupted: `stop` said so; the checkpoint is written.
        """
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        pending: Launched | None = None
        for step in range(self.done + 1, self.settings.steps + 1):
            launched = self._launch(step)
            self._read(pending)
            pending = launched
            stopping = self.group.any(stop())
            if stopping or self._due(step):
                self._read(pending)
                pending = None
                self._pause(step, stopping)
            if stopping and step < self.settings.steps:
                raise Interrupted(self._stopped(step))

    def _launch(self, step: int) -> Launched:
        begin = Clock(self.device)
        rate = self.settings.rate_at(step)
        micros = self.micros(step)
        seed_step(self.settings.seed, step, self.group.rank)
        self.step.set_rate(rate)
        loss, norm = self.advance(micros)
        values = torch.stack((loss, norm)).to("cpu", non_blocking=True)
        return Launched(step, rate, values, begin, Clock(self.device))

    def _read(self, launched: Launched | None) -> None:
        """Wait for a step and report it."""
        if launched is None:
            return
        ms = launched.end.ms_since(launched.begin)
        loss, norm = launched.values.tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise JetfireError(self._fault(launched.step, loss, norm))
        self.done = launched.step
        per_second = self.tokens_per_step / ms * 1e3
        self.report(
            {
                "kind": "step",
                "step": launched.step,
                "loss": loss,
                "norm": norm,
                "rate": launched.rate,
                "ms": round(ms, 3),
                "tokens_per_s": round(per_second, 1),
                "mfu": self._mfu(per_second),
                "peak_gib": self._peak_gib(),
            }
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.peak is None:
            return None
        peak = self.group.world * self.peak.tflops * 1e12
        return round(self.flops * tokens_per_second / peak, 4)

    def _peak_gib(self) -> float | None:
        """The allocator's peak; None on the CPU, where torch has none."""
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 3)

    def _due(self, step: int) -> bool:
        return self._every("evaluate_every", step) or self._every("checkpoint_every", step)

    def _every(self, name: str, step: int) -> bool:
        every = getattr(self.settings, name)
        return step == self.settings.steps or (every > 0 and step % every == 0)

    def _pause(self, step: int, stopping: bool) -> None:
        """Evaluate where it is time, and write what should be kept."""
        better = self._every("evaluate_every", step) and self._evaluated(step)
        if self.folder and (stopping or better or self._every("checkpoint_every", step)):
            self.group.each(self.tokens.check_untouched)
            checkpoint.save(self.folder, self.state(), self.model, self.step.optimizer, self.group)
            self.report({"kind": "checkpoint", "step": step})

    def _evaluated(self, step: int) -> bool:
        """Whether this evaluation is the best yet."""
        loss = self.evaluate()
        if not math.isfinite(loss):
            raise JetfireError(f"validation loss is {loss} at step {step}; {self._kept()}")
        self.report({"kind": "evaluation", "step": step, "loss": loss})
        if self.best is not None and self.best["loss"] <= loss:
            return False
        self.best = {"step": step, "loss": loss}
        return True

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats over fixed windows of the validation tokens, the same for all runs."""
        one, group = self.settings, self.group
        self.model.eval()
        windows = data.evaluation(
            self.tokens.validation,
            one.context,
            one.batch,
            one.evaluate_batches,
            device=self.device,
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

    def state(self) -> State:
        """What a checkpoint holds beside tensors."""
        shape = self.model.shape
        return {
            "step": self.done,
            "settings": self.settings.as_dict(),
            "processes": self.group.world,
            "vocabulary": self.vocabulary,
            "shape": {
                "layers": shape.layers,
                "heads": shape.heads,
                "width": shape.width,
                "context": shape.context,
                "vocabulary": shape.vocabulary,
                "dropout": shape.dropout,
            },
            "tokens": self.tokens_seen,
            "best": self.best,
        }

    def _kept(self) -> str:
        """Where the newest checkpoint is, for a message."""
        found = checkpoint.listed(self.folder) if self.folder else []
        return f"the last checkpoint is {found[-1]}" if found else "no checkpoint was written"

    def _stopped(self, step: int) -> str:
        if self.folder is None:
            return f"interrupted after step {step}"
        return f"interrupted after step {step}; --resume goes on from {self.folder}"

    def _fault(self, step: int, loss: float, norm: float) -> str:
        """Run a failed step's batch again to say which layer; no parameter has changed since."""
        seed_step(self.settings.seed, step, self.group.rank)
        layer = faults.find(self.model, self.micros(step), self.device, self.group)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        message = f"{what} at step {step}; first at {layer}; {self._kept()}"
        self.report({"kind": "fault", "step": step, "message": message})
        return message
