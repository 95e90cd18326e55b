"""NVIDIA's compute-sanitizer around the worker, or Triton's in its kernels, and what they say."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jetfire.core import files, registry
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.core.sanitizer import INSTRUMENTATION, Tool
from jetfire.fuzz.example import GUARD, Mode

TOOLS: tuple[Tool, ...] = get_args(Tool)
PROGRAM = "compute-sanitizer"
# Reports are written after the device was waited for, by another process.
DELAY_S = 0.1
LATE_S = 1.0  # and so late at most
# Without an error a log has these lines alone, and empty ones.
_QUIET = ("COMPUTE-SANITIZER", "SUMMARY: 0", "Target application terminated", "Process didn't")
# Where one begins, at the start of a line of the log.
_REPORT = re.compile(r"(?:^|(?<= · ))(?=(?:Error|Warning|Internal Sanitizer Error)\b)")
# As the driver prints it, once for each thread.
_ASSERTION = re.compile(r"^(.+?:\d+): .*thread: \[.*\] Assertion `(.*)` failed", re.MULTILINE)
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # Allocations next to each other would hide a write beyond one of them.
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}


def sift(tool: Tool, op: str, kernel: str, said: str) -> tuple[str, int]:
    """Return what a tool said but for known reports, and how many of those there were."""
    known_reports = [known for m in registry.beside(op, "sanitizer") for known in m.KNOWN]
    mine = [known for known in known_reports if (known.tool, known.kernel) == (tool, kernel)]
    reports = [report for report in _REPORT.split(said) if report.strip(" ·")]
    left = [report for report in reports if not any(known.matches(report) for known in mine)]
    return "".join(left).strip(" ·"), len(reports) - len(left)


def find() -> str:
    """The program's path: on PATH, or in CUDA_HOME's or the toolkit's usual folder.

    Raises:
        NoDeviceError: there is none.
    """
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    path = shutil.which(PROGRAM, path=os.pathsep.join(folders))
    if path is None:
        raise NoDeviceError(f"--sanitizer: no {PROGRAM} on PATH or in CUDA_HOME/bin")
    return path


def parse(tool: str) -> Tool:
    for known in TOOLS:
        if tool == known:
            return known
    raise UsageError(f"--sanitizer {tool}: expected {' or '.join(TOOLS)}")


def mode(tool: Tool) -> Mode:
    """Return how cases are run for a tool to see the kernel's own accesses, and only these.

    To memcheck a guard zone is memory like any other; for initcheck nothing may be filled.
    """
    guard = GUARD if tool in ("racecheck", "synccheck", "consan") else 0
    return Mode(host=True, guard=guard, initialised=tool != "initcheck")


def instrument() -> None:
    """Have this process's workers compile Triton kernels with consan, in a cache of its own.

    Raises:
        NoDeviceError: this Triton has none.
    """
    import triton
    from triton._C.libtriton import passes

    if not hasattr(passes.ttgpuir, "add_concurrency_sanitizer"):
        raise NoDeviceError(f"--sanitizer consan: Triton {triton.__version__} has none")
    os.environ[INSTRUMENTATION] = "consan"
    os.environ["TRITON_CACHE_DIR"] = str(files.cache() / "consan")


def serve_instrumented() -> None:
    """Give consan the memory that it asks for, and have it alone assert.

    With assertions Triton 3.6 compiles checks for the overflow of integers too, 3.7 does not.
    """
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    parse = CUDABackend.parse_options

    def parse_options(self: Any, options: dict[str, Any]) -> Any:
        return parse(self, {**options, "sanitize_overflow": False})

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    CUDABackend.parse_options = parse_options
    triton.set_allocator(allocate)


def assertions(printed: str) -> str:
    """Return each failed assertion of a kernel that a worker printed, in one line."""
    found = _ASSERTION.findall(printed)
    return " · ".join(dict.fromkeys(f"{text.strip()} · at {place}" for place, text in found))


@dataclass
class SanitizerSession:
    """One worker's compute-sanitizer, and how much of its log has been read."""

    tool: Tool

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._read = 0

    def command(self) -> list[str]:
        """Return what runs Python; every tensor is an allocation of its own.

        It waits as long as it takes until Python has imported torch and calls CUDA.
        """
        environment = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
        options = ["--tool", self.tool, "--log-file", str(self._log), "--launch-timeout", "0"]
        return [*environment, find(), *options, *_OPTIONS[self.tool]]

    def said(self, wait_s: float = DELAY_S) -> str:
        """Return what is new and no mere banner, in one line; empty where nothing is wrong."""
        time.sleep(wait_s)
        if not self._log.exists():
            return ""
        with self._log.open(errors="replace") as log:
            log.seek(self._read)
            new = log.read()
            self._read = log.tell()
        lines = [line.strip("= \n") for line in new.splitlines()]
        told = [line for line in lines if line and not any(quiet in line for quiet in _QUIET)]
        return " · ".join(told)

    def close(self) -> None:
        self._folder.cleanup()
