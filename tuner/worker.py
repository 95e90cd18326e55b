"""Child processes that compile and measure; whatever happens to one costs its config alone."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from jetfire.ops.device import Device
from jetfire.tuner import interrupts
from jetfire.tuner.trial import Measurement, Outcome

LOG_TAIL = 4000  # bytes of a dead worker's output that its trial's message gets
# Said once a worker has started and made what it needs: from here on its time is the config's.
BEGUN = "begun"
START = "start"  # a request for nothing but that


@dataclass(frozen=True)
class NotSetUp:
    """Why a job's inputs or expected results cannot be made: no config is to blame."""

    reason: str


class _Output:
    """A file without a name: nothing is left of it, whoever is killed. A child gets its number."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._file.fileno()),)

    def tail(self) -> str:
        number = self._file.fileno()
        start = max(0, os.fstat(number).st_size - LOG_TAIL)
        return os.pread(number, LOG_TAIL, start).decode(errors="replace").strip()

    def close(self) -> None:
        self._file.close()


def _received(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


class Worker:
    """A child that answers one request after another and can be killed at any time.

    Args:
        target: a function of this module: called there with a connection and the arguments.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._output = _Output()
        self._process = context.Process(
            target=_child, args=(theirs, self._output, os.getpid(), target, arguments), daemon=True
        )
        with interrupts.blocked():  # Ctrl-C reaches the whole process group
            self._process.start()
        theirs.close()

    def ask(self, *request: Any) -> None:
        self.connection.send(request)

    def answer(self) -> Any:
        """What it says; EOFError where it has died."""
        return self.connection.recv()

    def last_words(self) -> str:
        """How a dead worker ended, and the end of what it printed."""
        self._process.join(5.0)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        printed = self._output.tail()
        return f"worker ended by {how}" + (f"\n{printed}" if printed else "")

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join(10.0)
        self.connection.close()
        self._output.close()


def _child(
    connection: Connection, output: int, parent: int, target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    interrupts.ignore()  # the parent decides what ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            return
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        target(connection, *arguments)


def compile_configs(connection: Connection, capability: tuple[int, int]) -> None:
    """Answers ``(kernel, problem, config)`` with None, or why the config does not compile.

    Every request is answered by `BEGUN` first, then by a pair: the answer, and that the worker is
    fit for more.
    """
    from jetfire.tuner.measure import outcome_of

    while True:
        request = connection.recv()
        connection.send(BEGUN)
        if request == (START,):
            continue
        kernel, problem, config = request
        begin = time.perf_counter()
        answer = None
        try:
            kernel.cubins(problem, config, capability)
        except Exception as error:
            outcome: Outcome = "illegal" if outcome_of(error) == "illegal" else "compile"
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome, message=message, seconds=time.perf_counter() - begin)
        connection.send((answer, True))


def measure_configs(connection: Connection, device_name: str) -> None:
    """Answers ``("measure", job, config)`` and ``("compare", job, configs, budget_s)``.

    An answer is a Measurement or a Comparison. As in `compile_configs` it comes after `BEGUN`, and
    with whether the worker is fit for more: not after an error that leaves the device's context
    unusable. Where the job cannot be set up there is no `BEGUN`, and the answer is a NotSetUp.
    """
    import torch

    from jetfire.tuner.measure import Bench, outcome_of

    device = Device.parse(device_name)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
    bench: Bench | None = None
    while True:
        request = connection.recv()
        if request == (START,):
            connection.send(BEGUN)
            continue
        verb, job, *rest = request
        begin = time.perf_counter()
        answer: Any
        try:
            if bench is None or bench.job.key != job.key:
                bench = None
                if device.kind == "cuda":
                    torch.cuda.empty_cache()
                bench = Bench(job, device)
        except Exception as error:
            connection.send((NotSetUp(f"{type(error).__name__}: {error}"), _usable(device)))
            continue
        connection.send(BEGUN)
        try:
            answer = getattr(bench, verb)(*rest)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome_of(error), message=message,
                                 seconds=time.perf_counter() - begin)  # fmt: skip
        connection.send((answer, _usable(device)))


def _usable(device: Device) -> bool:
    """The device still works: an illegal address, say, is reported by every later call."""
    if device.kind != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize(device.index)
    except Exception:
        return False
    return True
