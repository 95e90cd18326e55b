"""A training step as CUDA graphs: a launch or two, so that no kernel waits for the host.

An INT8 step of a small model is hundreds of kernels of microseconds each, which Python launches
more slowly than the GPU runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from jetfire.core.errors import UsageError
from jetfire.gpt2.training.settings import Settings
from jetfire.gpt2.training.step import Micro, Step
from jetfire.nn import CapturedStep, replaying
from jetfire.nn.captured import LAUNCHED, beside, captured

Advance = Callable[[Sequence[Micro]], tuple[torch.Tensor, torch.Tensor]]


def used(settings: Settings, device: torch.device) -> bool:
    """Whether steps are replayed: where it was asked for, or was left open and can be.

    A compiled model's are if that was asked for, and so are a sharded one's.
    """
    cuda = device.type == "cuda"
    if settings.graph == "auto":
        return cuda and not settings.compile and settings.parallel != "fsdp"
    if settings.graph == "true" and not cuda:
        raise UsageError(f"graph=true: expected a CUDA device, not {device.type}")
    return settings.graph == "true"


def split(settings: Settings, device: torch.device) -> bool:
    """Whether a step is made of two parts, between which several processes' gradients are reduced.

    FSDP2 reduces them within backward.
    """
    return used(settings, device) and settings.parallel != "fsdp"


def graphed(step: Step) -> Advance:
    """Return what takes a step's place and replays it, once it was launched a few times.

    One process's step is one graph, and so is that of a sharded model, with its collectives. Any
    other of several processes must be made with `split`.
    """
    if step.group.world > 1 and not step.sharded:
        return SplitStep(step)
    return CapturedStep(step, step.optimizer)


class SplitStep:
    """A `Step` of several processes as two graphs: the gradients and the update.

    Between them the reduction is launched as ever, so that no graph waits for another process. All
    else is as of `CapturedStep`. Micro-batches must keep their number and shape.
    """

    def __init__(self, step: Step) -> None:
        if not step.split:
            raise ValueError("a step of several processes can be captured only if it is split")
        self.step = step
        self._stream = torch.cuda.Stream(step.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._inputs: list[Micro] = []
        self._gradients: list[torch.Tensor] = []
        self._loss = self._norm = torch.empty(0, dtype=torch.float32, device=step.device)
        self._launched = 0

    def __call__(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step, as `Step` does; return its loss and the gradient's norm."""
        if self._launched < LAUNCHED:
            self._launched += 1
            with beside(self._stream):
                return self.step(micros)
        if not self._graphs:
            self._capture(micros)
        for kept, new in zip(self._inputs, micros, strict=True):
            for to, source in zip(kept, new, strict=True):
                to.copy_(source)
        gradients, update = self._graphs
        with replaying(self.step.optimizer):
            gradients.replay()
            self.step.reduce(self._loss, self._gradients)
            update.replay()
        return self._loss.clone(), self._norm.clone()

    def _capture(self, micros: Sequence[Micro]) -> None:
        step = self.step
        self._inputs = [(ids.clone(), targets.clone()) for ids, targets in micros]
        with replaying(step.optimizer):
            pass  # so that all weights' codes are made in the graph, but those that an update makes
        step.optimizer.zero_grad(set_to_none=True)
        gradients, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with captured(gradients, self._stream):
            self._loss = step.gradients(self._inputs)
        # Kept, as each replay writes where they are, whatever becomes of the parameters' `grad`.
        self._gradients = step.gradients_made()
        with captured(update, self._stream):
            self._norm = step.update(self._loss)
        self._graphs = [gradients, update]
