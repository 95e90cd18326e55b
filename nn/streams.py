"""CUDA streams beside the current one, so that a kernel's last tiles leave nothing idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


@cache
def _stream(device: int, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Branch:
    """Work beside the current stream, from now until `join`; on a CPU it runs where it stands.

    What is launched within `here` runs after all that was launched before it was made. Keep
    what it reads until `join`: the allocator gives freed memory to the current stream at once.
    What it makes may be used after `join`.

    Two kernels that each fill a GPU run one after another either way: what a branch gains is the
    time in which one begins and the other's last tiles end. The updates of 350M's 97 INT8 weights
    took 0.4 ms of a step of 36.5 less so; products for weights' gradients beside those for inputs'
    gained nothing.

    Args:
        number: tells branches that run beside each other.
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and not torch.compiler.is_compiling():
            self._current = torch.cuda.current_stream(device)
            self._stream = _stream(self._current.device_index, number)
            self._stream.wait_stream(self._current)

    def here(self) -> AbstractContextManager[object]:
        """Return what has work launched in the branch, and then where it was launched before."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Have the current stream wait for the branch."""
        if self._stream is not None:
            self._current.wait_stream(self._stream)


@contextmanager
def branches(
    devices: Iterable[torch.device], count: int
) -> Iterator[dict[torch.device, list[Branch]]]:
    """Make `count` branches on each device, and join them at the end, whatever happens."""
    made = {device: [Branch(device, i) for i in range(count)] for device in devices}
    try:
        yield made
    finally:
        for device in made:
            for branch in made[device]:
                branch.join()
