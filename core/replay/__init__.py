"""Calls of operators on a GPU without Python: recorded at the second call, replayed from then on.

A call of an operator through Python takes tens of microseconds on the host: a problem, a plan, a
Triton launch. What it launches depends on its tensors' dtypes, sizes, strides and alignments and on
its other arguments alone, but for the addresses. So the launches of one call are captured twice
(`capture`), of tensors at different addresses; the words that differ are the addresses, and each
differs by as much as its tensor was moved. Where any other word differs, or the call does anything
but allocate and launch kernels, the operator's calls with these arguments stay with Python.

Without a C++ compiler, or with ``JETFIRE_REPLAY=off``, every call stays with Python.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetfire.core import environment, profiles, terminal, workspace
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.replay import build
from jetfire.core.replay.capture import Capture, CaptureError, KernelLaunch

DRIVER = "libcuda.so.1"
TORCH = str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")
# Twins are so many bytes apart for each tensor: a multiple of what kernels choose by, and so few
# that a twin of a few bytes lies within the 512 that the allocator gives at least.
STEP = 16
# Solves a call, and returns the tensors that are its results: none where it writes to arguments.
Solve = Callable[..., Sequence[torch.Tensor]]
# Makes a context in which memory is allocated as ever.
Home = Callable[[], AbstractContextManager[object]]

_lock = threading.RLock()
# By name, with its overload: ``gelu`` or ``cross_entropy.constant``.
_served: dict[str, Served] = {}
_waiting: list[str] = []
# Why calls of an operator are left with Python, by the operator's name.
refusals: dict[str, str] = {}


class Refused(Exception):
    """What a call does that cannot be replayed."""


@dataclass(frozen=True)
class Served:
    """An operator whose calls are replayed.

    Attributes:
        run: solves a call in Python and returns what the operator's schema says.
        solve: solves a call too, and returns its new tensors as a list, empty where it writes to
            arguments.
        written: places of the arguments that it writes to.
    """

    run: Callable[..., Any]
    solve: Solve
    written: Sequence[int]


def serve(name: str, served: Served) -> Callable[..., Any]:
    """Return the Python kernel to define for CUDA; its first call has C++ take over.

    Args:
        name: the operator's, with its overload.
    """
    _served[name] = served
    _waiting.append(name)

    def first(*args: Any) -> Any:
        if extension() is not None:
            with _lock:
                while _waiting:
                    take_over(_waiting.pop(), "CUDA")
        return served.run(*args)

    return first


def take_over(name: str, key: str) -> None:
    """Have C++ take over an operator under a dispatch key, for as long as the process lives."""
    packet, _, overload = name.partition(".")
    run = _served[name].run
    extension().install(f"jetfire::{packet}", overload, key, run, Recorder(name))


@cache
def extension() -> Any:
    """Return the C++ module; None where calls are left with Python.

    Raises:
        UsageError: JETFIRE_REPLAY is neither on nor off.
    """
    if not environment.switch("JETFIRE_REPLAY", default=True):
        return None
    try:
        module = build.extension()
        _load_dynamo()
        module.connect(DRIVER, TORCH)
    except (UsageError, RuntimeError) as error:  # the second of a library without what is needed
        reason = str(error).partition("\n")[0]
        text = f"{reason}: every call of an operator takes tens of microseconds longer on the host"
        warnings.warn(text, JetfireWarning, stacklevel=2)
        return None
    profiles.when_forgotten(module.forget)  # kernels and configs are then chosen anew
    return module


def _load_dynamo() -> None:
    """Load torch._dynamo, which torch does in a dispatch mode's first call, in a thread of its own.

    A frame of that import refers to itself (`torch.fx.wrap`'s), and so its callers' frames live on:
    with them the graph of autograd that they are making, whose nodes belong to their stream, and a
    CUDA graph that is captured on another stream fails. A thread has no callers.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


class Recorder:
    """Makes plans of an operator's calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        """Return the plan of a call that was solved before, or None where Python is to solve it."""
        try:
            with _lock:
                return self._plan(args)
        except (Refused, CaptureError) as reason:
            refusals[self._name] = str(reason)
            terminal.decision(f"{self._name}: such calls stay with Python: {reason}")
        except Exception as error:  # a fault of ours, and none of the call, which is solved
            text = f"calls of {self._name} cannot be replayed: {error!r}"
            warnings.warn(text, JetfireWarning, stacklevel=2)
        return None

    def _plan(self, args: tuple[Any, ...]) -> Any:
        served = _served[self._name]
        given = [x for x in args if isinstance(x, torch.Tensor)]
        with aside(given[0].device) as (stream, home):
            recording = _Recording(served.solve, args, stream, home)
            first = recording.of(_moved(given, [0] * len(given)))
            tensors = [*given, *first.made]
            moves = _moves(tensors)
            twins = _moved(tensors, moves)
            second = recording.of(twins[: len(given)], first, twins[len(given) :])
        results = _places(first.made, first.results)
        scratch = [i for i in range(len(first.made)) if i not in results]
        # C++ counts the arguments' tensors, then the results, then the scratch memory.
        order = [*range(len(given)), *(len(given) + i for i in (*results, *scratch))]
        launches = _compared(first.launches, second.launches, tensors, moves, order)
        among = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        written = [among.index(i) for i in served.written if i in among]
        made = ([first.made[i] for i in places] for places in (results, scratch))
        return extension().Plan(launches, *made, written)


@dataclass(frozen=True)
class _Recorded:
    """What a call launches, the memory that it allocates, what of that it returns, its counters."""

    launches: list[KernelLaunch]
    made: list[torch.Tensor]
    results: list[torch.Tensor]
    counters: list[torch.Tensor]


@dataclass(frozen=True)
class _Recording:
    """Records calls with the same arguments but for their tensors.

    Attributes:
        stream: a stream to capture on, the current one.
    """

    solve: Solve
    args: tuple[Any, ...]
    stream: int
    home: Home

    def of(
        self,
        tensors: Sequence[torch.Tensor],
        before: _Recorded | None = None,
        memory: Sequence[torch.Tensor] = (),
    ) -> _Recorded:
        """Capture the call's launches with other tensors.

        Args:
            before: the first recording, whose counters the call gets again.
            memory: what it then gets for the memory that it allocates, in order.
        """
        others = iter(tensors)
        args = [next(others) if isinstance(x, torch.Tensor) else x for x in self.args]
        results: list[torch.Tensor] = []

        def solve() -> None:
            results.extend(self.solve(*args))

        known, again = (before.counters, memory) if before else ([], None)
        with _Memory(self.home, again) as used, workspace.repeating(known) as counters:
            launches = Capture(DRIVER).launches(self.stream, solve)
        return _Recorded(launches, used.given, results, counters)


class _Memory(TorchDispatchMode):
    """Notes the memory that a call allocates, or gives it other memory; refuses all else of torch.

    Args:
        memory: what to give, in order; None allocates.
    """

    def __init__(self, home: Home, memory: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self._home, self._memory = home, memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "jetfire":
            with self:
                return _served[func._name.removeprefix("jetfire::")].run(*args)
        if func.overloadpacket not in workspace.ALLOCATING:
            if not func.is_view:
                raise Refused(f"it calls {func}")
            return func(*args, **(kwargs or {}))
        if self._memory is None:
            with self._home():
                self.given.append(func(*args, **(kwargs or {})))
        elif len(self.given) < len(self._memory):
            self.given.append(self._memory[len(self.given)])
        else:
            raise Refused("it allocates otherwise each time")
        return self.given[-1]


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def aside(device: torch.device) -> Iterator[tuple[int, Home]]:
    """Give a stream that nothing else uses, the current one within, and the way back from it."""
    assert device.index is not None
    stream, before = _side_stream(device.index), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        yield stream.cuda_stream, lambda: torch.cuda.stream(before)


def _moves(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return by how many bytes to move each tensor, no two by as many.

    The smallest is moved least, so that it stays in memory that the driver knows.
    """
    by_size = sorted(range(len(tensors)), key=lambda i: tensors[i].nbytes)
    moves = [0] * len(tensors)
    for rank, i in enumerate(by_size):
        moves[i] = STEP * (rank + 1)
    return moves


def _moved(tensors: Sequence[torch.Tensor], moves: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors of the same kinds, so many bytes further on: none is to be read."""
    pairs = zip(tensors, moves, strict=True)
    return [extension().shifted(x.detach(), by) for x, by in pairs]


def _places(made: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[int]:
    """Return which of the allocated tensors are the results."""
    places = [next((i for i, x in enumerate(made) if x is result), None) for result in results]
    found = [place for place in places if place is not None]
    if len(set(found)) < len(results):
        raise Refused("a result is not a new tensor of its own")
    return found


def _compared(
    first: Sequence[KernelLaunch],
    second: Sequence[KernelLaunch],
    tensors: Sequence[torch.Tensor],
    moves: Sequence[int],
    order: Sequence[int],
) -> list[Any]:
    """Return the launches as C++ takes them, with the addresses found.

    Args:
        second: the same of tensors that were moved by `moves` bytes.
        order: the tensors in the order in which C++ counts them.

    Raises:
        Refused: the launches differ in anything but the tensors' addresses.
    """
    if len(first) != len(second):
        raise Refused("it launches otherwise each time")
    moved = {moves[i]: (number, tensors[i].data_ptr()) for number, i in enumerate(order)}
    made = []
    for one, other in zip(first, second, strict=True):
        if replace(one, parameters=b"") != replace(other, parameters=b""):
            raise Refused("its launch depends on more of an address than 16 bytes show")
        words, others = (np.frombuffer(x.parameters, np.int64) for x in (one, other))
        patches = []
        for at in np.flatnonzero(words != others):
            number, begin = moved.get(int(others[at]) - int(words[at]), (None, 0))
            if number is None:
                raise Refused(f"its parameters differ at byte {8 * at} by no tensor's address")
            patches.append((8 * int(at), number, int(words[at]) - begin))
        made.append(extension().Launch(**vars(one), patches=patches))
    return made
