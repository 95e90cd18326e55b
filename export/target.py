"""Targets: the files around a library, and how they are built and called."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jetfire.core.errors import UsageError, WrongResultError
from jetfire.core.tensors import Tensors
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan
from jetfire.export.samples import Sample


class ExportTarget(ABC):
    """One form of an export."""

    @abstractmethod
    def tools(self, library: Library) -> Sequence[str]:
        """Programs that `build` runs, such as nvcc: looked for before anything is written."""

    @abstractmethod
    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        """All files of the folder by relative path: the library's, the sample's and its own."""

    @abstractmethod
    def build(self, plan: ExportPlan, folder: Path) -> None:
        """Build in a folder that holds `files`, as its README tells a user to.

        Raises:
            WrongResultError: it does not build; the compiler's last lines are in the message.
        """

    def products(self, folder: Path) -> Sequence[Path]:
        """Return the files that `build` made and the export has, relative to the folder.

        By default there are none: whoever gets the sources builds them.
        """
        return ()

    @abstractmethod
    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        """Run the folder's own self-test, on a GPU, after `build`.

        Raises:
            WrongResultError: it fails; its output is in the message.
        """

    @abstractmethod
    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        """Return a function of (problem, inputs, outputs) that enqueues the built kernel.

        It does so on torch's current stream, as `Kernel.launch`, so that both can be timed. It
        gives back what it wrote: the outputs given, or those that it allocated itself.
        """


def program(variable: str, default: str) -> str:
    """Return what a Makefile runs where an environment variable such as CC may name another."""
    words = shlex.split(os.environ.get(variable, ""))
    return words[0] if words else default


def require(programs: Sequence[str]) -> None:
    """Raise UsageError for the first program that is not on the PATH."""
    for name in programs:
        if shutil.which(name) is None:
            raise UsageError(
                f"{name} is not on the PATH: install it, or give --no-check to write without "
                "building"
            )


def cuda_home() -> Path:
    """The CUDA toolkit: $CUDA_HOME, $CUDA_PATH, its usual place, or where nvcc is.

    Raises:
        UsageError: none of these has cuda.h.
    """
    places = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(place) for place in (*places, "/usr/local/cuda") if place]
    if nvcc := shutil.which("nvcc"):
        found.append(Path(nvcc).resolve().parent.parent)
    for folder in found:
        if (folder / "include" / "cuda.h").is_file():
            return folder
    raise UsageError(
        "no cuda.h: set CUDA_HOME to a CUDA toolkit, or give --no-check to write without building"
    )


_running: set[subprocess.Popen[str]] = set()
_stopped = threading.Event()
_starting = threading.Lock()  # held while a program is started, and while all are ended


def stop() -> None:
    """End the programs that `run` waits for in other threads; it starts none until `resume`."""
    with _starting:
        _stopped.set()
        for process in list(_running):
            _end(process)


def resume() -> None:
    """Allow programs again after `stop`, once the threads that it was for have ended."""
    _stopped.clear()


def _start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    """Start a program; raise WrongResultError after `stop`."""
    with _starting:
        if _stopped.is_set():
            raise WrongResultError(f"{shlex.join(command)}: not started, as all was stopped")
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        _running.add(process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> str:
    """Run a program in a folder and return what it printed.

    What it has started ends with it, also where this process is interrupted.

    Raises:
        WrongResultError: it failed or took too long, the end of what it printed is in the message;
            or all was stopped.
    """
    words = shlex.join(command)
    with _start(command, folder, environment) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            _end(process)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise WrongResultError(f"{words}: took over {timeout_s:g} s") from None
            raise
        finally:
            _running.discard(process)
    if process.returncode:
        end = output.strip()[-2000:]
        raise WrongResultError(f"{words}: exit code {process.returncode}: {end}")
    return output
