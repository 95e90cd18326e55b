"""A training step as CUDA graphs: a launch or two, so that no kernel waits for the host.

An INT8 step of a small model is hundreds of kernels of microseconds each, which Python launches
more slowly than the GPU runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from jetfire.core.errors import UsageError
from jetfire.gpt2.training.settings import Settings
from jetfire.gpt2.training.step import Micro, Step
from jetfire.nn import replaying

# Steps before the capture: the first compiles kernels, and optimizer state and cuBLAS's workspace
# must stand before they can be captured.
_EAGER = 2


def used(settings: Settings, device: torch.device) -> bool:
    """Whether steps are replayed: where it was asked for, or was left open and can be.

    A compiled model's are if that was asked for.
    """
    cuda = device.type == "cuda"
    if settings.graph == "auto":
        return cuda and not settings.compile and settings.parallel != "fsdp"
    if settings.graph == "true" and not cuda:
        raise UsageError(f"graph=true: expected a CUDA device, not {device.type}")
    return settings.graph == "true"


class GraphedStep:
    """A `Step` that runs as it is at first, is then captured once, and replayed from there on.

    Every step is a real one: capturing changes nothing. Random numbers follow torch's seed as in
    the step itself. Micro-batches must keep their number and shape.

    One process's step is one graph. With several there are two, the gradients and the update, and
    between them, launched as ever, the reduction, so that no graph waits for another process. The
    step must be made with `split` then.
    """

    def __init__(self, step: Step) -> None:
        if step.group.world > 1 and not step.split:
            raise ValueError("a step of several processes can be captured only if it is split")
        self.step = step
        self._stream = torch.cuda.Stream(step.device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._inputs: list[Micro] = []
        self._gradients: list[torch.Tensor] = []
        self._loss = self._norm = torch.empty(0, dtype=torch.float32, device=step.device)
        self._eager = 0

    def __call__(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step, as `Step` does; return its loss and the gradient's norm."""
        if self._eager < _EAGER:
            self._eager += 1
            return self._beside(micros)
        if not self._graphs:
            self._capture(micros)
        for kept, new in zip(self._inputs, micros, strict=True):
            for to, source in zip(kept, new, strict=True):
                to.copy_(source)
        self._replay()
        return self._loss.clone(), self._norm.clone()

    def _replay(self) -> None:
        first, *rest = self._graphs
        with replaying(self.step.optimizer):
            first.replay()
            for update in rest:
                self.step.reduce(self._loss, self._gradients)
                update.replay()

    def _beside(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """A step on the stream that the capture uses: autograd remembers where gradients arose."""
        current = torch.cuda.current_stream(self.step.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self.step(micros)
        current.wait_stream(self._stream)
        return outputs

    def _capture(self, micros: Sequence[Micro]) -> None:
        step = self.step
        self._inputs = [(ids.clone(), targets.clone()) for ids, targets in micros]
        step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if step.group.world == 1:
            with self._captured():
                self._loss, self._norm = step(self._inputs)
            return
        with self._captured():
            self._loss = step.gradients(self._inputs)
        # Kept, as each replay writes where they are, whatever becomes of the parameters' `grad`.
        self._gradients = step.gradients_made()
        with self._captured():
            self._norm = step.update(self._loss)

    @contextmanager
    def _captured(self) -> Iterator[None]:
        """Capture what is launched in here as the next graph."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, a thread, asks after events, which "global" would forbid it.
        mode = "global" if self.step.group.host is None else "thread_local"
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode):
            yield
        self._graphs.append(graph)
