"""What a target is: the files around a library, and how they are built and called."""

from __future__ import annotations

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jetfire.export.library import Library
from jetfire.export.plan import Plan
from jetfire.export.samples import Sample
from jetfire.ops.errors import UsageError, WrongResultError
from jetfire.ops.op import Tensors

if TYPE_CHECKING:
    from typing import Any


class Target(ABC):
    """One form of an export."""

    @abstractmethod
    def tools(self, library: Library) -> Sequence[str]:
        """Programs that `build` runs, such as nvcc: looked for before anything is written."""

    @abstractmethod
    def files(self, plan: Plan, library: Library, sample: Sample) -> dict[str, bytes]:
        """All files of the folder by relative path: the library's, the sample's and its own."""

    @abstractmethod
    def build(self, plan: Plan, folder: Path) -> None:
        """Build in a folder that holds `files`, as its README tells a user to.

        Raises:
            WrongResultError: it does not build; the compiler's last lines are in the message.
        """

    def products(self, plan: Plan, folder: Path) -> Sequence[Path]:
        """What `build` made that belongs to the export, relative to the folder; by default nothing,
        as whoever gets the sources builds them."""
        return ()

    @abstractmethod
    def selftest(self, plan: Plan, folder: Path) -> None:
        """Run the folder's own self-test, on a GPU, after `build`.

        Raises:
            WrongResultError: it fails; its output is in the message.
        """

    @abstractmethod
    def call(self, plan: Plan, folder: Path) -> Callable[[Any, Tensors, Tensors], None]:
        """After `build`: a function of (problem, inputs, outputs) that enqueues the exported kernel
        on torch's current stream, as `Kernel.launch` does; for timing them against each other.

        A target whose function allocates its outputs may ignore those given.
        """


def require(programs: Sequence[str]) -> None:
    """Raises UsageError for the first program that is not on the PATH."""
    for program in programs:
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} is not on the PATH: install it, or give --no-check to write without "
                "building"
            )


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> str:  # fmt: skip
    """Run a program in a folder and return what it printed.

    Raises:
        WrongResultError: it failed or took too long; the end of what it printed is in the message.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WrongResultError(f"{' '.join(command)}: took over {timeout_s:g} s") from None
    if done.returncode:
        end = (done.stdout + done.stderr).strip()[-2000:]
        raise WrongResultError(f"{' '.join(command)}: exit code {done.returncode}: {end}")
    return done.stdout
