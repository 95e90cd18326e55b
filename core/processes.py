"""Child processes that can be killed at any time and leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jetfire.core import interrupts

LOG_TAIL = 4000  # the last bytes of a dead worker's output, which its last words show
# Runs a command in a process group of its own, which ends with the process that started it.
_START = """\
import ctypes, os, sys
os.setpgid(0, 0)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def started(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, which ends with this process.

    Ctrl-C on the terminal does not reach it. Its stdout and stderr are one pipe, to be read. The
    thread that calls must live as long as the command: to Linux it is the parent.
    """
    python = os.fsdecode(spawn.get_executable())
    return subprocess.Popen(
        [python, "-ISc", _START, str(os.getpid()), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # before the child runs any Python that Ctrl-C would interrupt
    )


def killed(process: subprocess.Popen[str]) -> None:
    """Kill what `started` gave where it still runs, with all of its group, and wait for it."""
    if process.poll() is None:  # else its number may be another's by now
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Output:
    """A file without a name, which no killed process leaves behind. A child gets its descriptor."""

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


class _Python:
    """The executable of a child: this Python, or a script that runs it under a command."""

    def __init__(self, under: Sequence[str]) -> None:
        self._folder = None
        if under:
            self._folder = tempfile.TemporaryDirectory()
            self._script = Path(self._folder.name) / "python"
            python = os.fsdecode(spawn.get_executable())
            words = shlex.join([python, "-ISc", _START, str(os.getpid()), *under, python])
            self._script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            self._script.chmod(0o700)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Start processes with this executable within the block."""
        if self._folder is None:
            yield
            return
        usual = spawn.get_executable()
        spawn.set_executable(str(self._script))
        try:
            yield
        finally:
            spawn.set_executable(usual)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


class Worker:
    """A child that answers one request after another and can be killed at any time.

    Args:
        target: a module's function, which the child calls with a connection and the arguments.
        under: a command that runs Python, such as a sanitizer's. It is killed with all that it has
            started.
        parent: the child may start children of its own, and ends them before it ends.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: Any,
        under: Sequence[str] = (),
        parent: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._output = _Output()
        self._python = _Python(under)
        self._grouped = bool(under)
        starter = None if under else os.getpid()
        self._process = context.Process(
            target=_child,
            args=(theirs, self._output, starter, target, arguments),
            daemon=not parent,
        )
        # Else the first child starts the tracker: with the script, and it unblocks the signals.
        resource_tracker.ensure_running()
        # Ctrl-C reaches the whole process group. A child interrupted before its `ignore` would
        # print a traceback where the user sees it.
        with interrupts.deferred(), interrupts.blocked(), self._python.used():
            self._process.start()
        theirs.close()

    def ask(self, *request: Any) -> None:
        self.connection.send(request)

    def answer(self) -> Any:
        """Return the child's next answer; EOFError where it has died."""
        return self.connection.recv()

    def waits(self) -> dict[int, float]:
        """Return the seconds that each of the child's threads was ready to run while others ran.

        Empty where the child has ended, and on systems other than Linux, which do not say.
        """
        found = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
                found[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        return found

    def printed(self) -> str:
        """Return the end of what it printed."""
        return self._output.tail()

    def last_words(self) -> str:
        """Return how a dead worker ended, and the end of what it printed."""
        self._process.join(5.0)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        printed = self.printed()
        return f"worker ended by {how}" + (f"\n{printed}" if printed else "")

    def close(self, wait_s: float = 0.0) -> None:
        """End the child: close its connection, and kill it once `wait_s` seconds have passed."""
        self.connection.close()
        if wait_s > 0:
            self._process.join(wait_s)
        if self._grouped and self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join(10.0)
        self._output.close()
        self._python.close()


class Patience:
    """A worker's time limit, which does not count the seconds that others kept it from running.

    A busy machine is no fault of what the worker does. Where the system does not say how long the
    worker waited, all seconds count.

    Args:
        limit: seconds.
        now: a clock's time in seconds.
    """

    def __init__(self, worker: Worker, limit: float, now: float) -> None:
        self.limit = limit
        self._worker, self._end = worker, now + limit
        self._before, self._waited = worker.waits(), 0.0

    def left(self, now: float) -> float:
        """Return the seconds that are left; 0 or less once the limit has passed."""
        if now >= self._end:
            waits = self._worker.waits()
            waited = max((waits[t] - self._before.get(t, 0.0) for t in waits), default=0.0)
            self._end += max(0.0, waited - self._waited)
            self._waited = max(waited, self._waited)
        return self._end - now


def _child(
    connection: Connection,
    output: int,
    parent: int | None,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    interrupts.ignore()  # the parent decides when a child ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            return
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        target(connection, *arguments)
