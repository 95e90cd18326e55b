"""The training loop: steps, evaluations, checkpoints, and what a step says of itself.

Losses are read one step late, while the next is under way, so that a GPU never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from jetfire.core.errors import Interrupted, JetfireError
from jetfire.gpt2.training import checkpoint, faults, log
from jetfire.gpt2.training.state import Clock, Trained
from jetfire.gpt2.training.step import seed_step


@dataclass
class Launched:
    """A step that the device may still be at; `values` (loss, norm) are there when `end` is."""

    step: int
    rate: float
    values: torch.Tensor
    begin: Clock
    end: Clock


class Training(Trained):
    """One run under way."""

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the last step.

        Raises:
            JetfireError: a loss or a gradient was not finite; names the step and the layer.
            UsageError: the run is to be deterministic, and its processes launch kernels of
                different bits.
            Interrupted: `stop` said so; the checkpoint is written.
        """
        self.model.train()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        pending: Launched | None = None
        first = self.done + 1
        for step in range(first, self.settings.steps + 1):
            if self.settings.watch and step % self.settings.watch == 0:
                self._read(pending)
                pending = None
                self._watch(step)
            launched = self._launch(step)
            if step == first:  # by which every kernel of a step was chosen
                self.group.check_agreement(strict=self.settings.deterministic)
            self._read(pending)
            pending = launched
            stopping = self.group.any(stop())
            evaluating = self._due("evaluate_every", step)
            saving = self._due("checkpoint_every", step)
            if stopping or evaluating or saving:
                self._read(pending)
                pending = None
                better = evaluating and self._evaluated(step)
                if self.folder and (stopping or better or saving):
                    self.save()
                    self.report({"kind": "checkpoint", "step": step})
            if stopping and step < self.settings.steps:
                on = "" if self.folder is None else f"; --resume goes on from {self.folder}"
                raise Interrupted(f"interrupted after step {step}{on}")

    def _watch(self, step: int) -> None:
        """Report what quantisation is about to do to the first process's first micro-batch."""
        if self.group.leads:
            seed_step(self.settings.seed, step, self.group.rank)  # as the step itself, afterwards
            self.report(log.watched(step, self.step.watched(*self.micros(step)[0])))

    def _launch(self, step: int) -> Launched:
        """Have the device take a step."""
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
        peak = None  # on the CPU torch has no allocator that tells it
        if self.device.type == "cuda":
            peak = round(torch.cuda.max_memory_allocated(self.device) / 2**30, 3)
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
                "peak_gib": peak,
            }
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.peak is None:
            return None
        peak = self.group.world * self.peak.tflops * 1e12
        return round(self.flops * tokens_per_second / peak, 4)

    def _due(self, name: str, step: int) -> bool:
        every = getattr(self.settings, name)
        return step == self.settings.steps or (every > 0 and step % every == 0)

    def _evaluated(self, step: int) -> bool:
        """Evaluate, and return whether it is the best yet."""
        loss = self.evaluate()
        if not math.isfinite(loss):
            raise JetfireError(f"validation loss is {loss} at step {step}; {self._kept()}")
        self.report({"kind": "evaluation", "step": step, "loss": loss})
        if self.best is not None and self.best["loss"] <= loss:
            return False
        self.best = {"step": step, "loss": loss}
        return True

    def _fault(self, step: int, loss: float, norm: float) -> str:
        """Run a failed step's batch again to say which layer; no parameter has changed since."""
        seed_step(self.settings.seed, step, self.group.rank)
        layer = faults.find(self.model, self.micros(step), self.device, self.group)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        message = f"{what} at step {step}; first at {layer}; {self._kept()}"
        self.report({"kind": "fault", "step": step, "message": message})
        return message

    def _kept(self) -> str:
        """Return where the newest checkpoint is, for a message."""
        found = checkpoint.listed(self.folder) if self.folder else []
        return f"the last checkpoint is {found[-1]}" if found else "no checkpoint was written"
