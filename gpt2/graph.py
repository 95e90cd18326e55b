"""A training step as a CUDA graph: one launch, so that no kernel waits for the host.

An INT8 step of GPT-2 124M is some 900 kernels of 5 to 50 µs, which Python launches more slowly than
the GPU runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetfire.gpt2.step import Micro, Step
from jetfire.nn import replaying

# Steps before the capture: the first compiles kernels, and optimizer state and cuBLAS's workspace
# must stand before they can be captured.
_EAGER = 2


class GraphedStep:
    """A `Step` that runs as it is at first, is then captured once, and replayed from there on.

    Every step is a real one: capturing changes nothing. Random numbers follow torch's seed as in
    the step itself. Micro-batches must keep their number and shape.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._stream = torch.cuda.Stream(step.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Micro] = []
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._eager = 0

    def __call__(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Step`."""
        if self._eager < _EAGER:
            self._eager += 1
            return self._beside(micros)
        if self._graph is None:
            self._capture(micros)
        assert self._graph is not None
        assert self._outputs is not None
        for kept, new in zip(self._inputs, micros, strict=True):
            for to, source in zip(kept, new, strict=True):
                to.copy_(source)
        with replaying(self.step.optimizer):
            self._graph.replay()
        loss, norm = self._outputs
        return loss.clone(), norm.clone()

    def _beside(self, micros: Sequence[Micro]) -> tuple[torch.Tensor, torch.Tensor]:
        """A step on the stream that the capture uses: autograd remembers where gradients arose."""
        current = torch.cuda.current_stream(self.step.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self.step(micros)
        current.wait_stream(self._stream)
        return outputs

    def _capture(self, micros: Sequence[Micro]) -> None:
        self._inputs = [(ids.clone(), targets.clone()) for ids, targets in micros]
        self.step.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._outputs = self.step(self._inputs)
