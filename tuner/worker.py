"""Child processes that compile and measure; whatever happens to one costs its config alone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jetfire.ops.device import Device
from jetfire.tuner.trial import Measurement, Outcome

LOG_TAIL = 4000  # characters of a dead worker's output that its trial's message gets


class Worker:
    """A child that answers one request after another and can be killed at any time.

    Args:
        target: a function of this module: called there with a connection and the arguments.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="jetfire-worker-", suffix=".log")
        os.close(handle)
        self._output = Path(name)
        self._process = context.Process(
            target=_child, args=(theirs, name, os.getpid(), target, arguments), daemon=True
        )
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
        printed = self._output.read_text(errors="replace")[-LOG_TAIL:].strip()
        return f"worker ended by {how}" + (f"\n{printed}" if printed else "")

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join(10.0)
        self.connection.close()
        self._output.unlink(missing_ok=True)


def _child(
    connection: Connection, output: str, parent: int, target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    # Ctrl-C reaches the whole process group; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            return
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        target(connection, *arguments)


def compile_configs(connection: Connection, capability: tuple[int, int]) -> None:
    """Answers ``(kernel, problem, config)`` with None, or why the config does not compile."""
    from jetfire.tuner.measure import outcome_of

    while True:
        kernel, problem, config = connection.recv()
        begin = time.perf_counter()
        answer = None
        try:
            kernel.cubins(problem, config, capability)
        except Exception as error:
            outcome: Outcome = "illegal" if outcome_of(error) == "illegal" else "compile"
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome, message=message, seconds=time.perf_counter() - begin)
        connection.send(answer)


def measure_configs(connection: Connection, device_name: str) -> None:
    """Answers ``("measure", job, config)`` and ``("compare", job, configs, budget_s)``.

    An answer is a Measurement or a Comparison, or an exception's text. After an error that leaves
    the device's context unusable the process ends.
    """
    import torch

    from jetfire.tuner.measure import Bench, outcome_of

    device = Device.parse(device_name)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)
    bench: Bench | None = None
    while True:
        verb, job, *rest = connection.recv()
        begin = time.perf_counter()
        answer: Any
        try:
            if bench is None or bench.job.key != job.key:
                bench = None
                if device.kind == "cuda":
                    torch.cuda.empty_cache()
                bench = Bench(job, device)
            answer = getattr(bench, verb)(*rest)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answer = Measurement(outcome_of(error), message=message,
                                 seconds=time.perf_counter() - begin)  # fmt: skip
        usable = _usable(device)
        connection.send(answer)
        if not usable:
            return


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
