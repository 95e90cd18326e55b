"""NVIDIA's compute-sanitizer around the worker, and what it says of a case."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.fuzz.mode import Mode

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
PROGRAM = "compute-sanitizer"
# Reports are written after the device was waited for, by another process.
DELAY_S = 0.1
LATE_S = 1.0  # and so late at most
# Without an error a log has these lines alone, and empty ones.
_QUIET = ("COMPUTE-SANITIZER", "SUMMARY: 0", "Target application terminated", "Process didn't")
# Where one begins, at the start of a line of the log; and where one's next counterpart does.
_REPORT = re.compile(r"(?:^|(?<= · ))(?=(?:Error|Warning|Internal Sanitizer Error)\b)")
_COUNTERPART = re.compile(r"(?=\band \w+ access at )")
_OPTIONS: dict[Tool, tuple[str, ...]] = {
    # Allocations next to each other would hide a write beyond one of them.
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}


@dataclass(frozen=True)
class Known:
    """Reports that are no fault: of two accesses, or of one and several counterparts.

    Attributes:
        access: what one of them says first.
        counterpart: how each of its counterparts begins.
        reason: why.
    """

    tool: Tool
    op: str
    kernel: str
    access: re.Pattern[str]
    counterpart: re.Pattern[str]
    reason: str

    def matches(self, report: str) -> bool:
        first, *others = _COUNTERPART.split(report)
        return (
            self.access.search(first) is not None
            and len(others) > 0
            and all(self.counterpart.match(other) for other in others)
        )


_FACTORS = (
    "A warp writes factors, meets in __syncwarp, and one lane arrives at the slot's barrier for "
    "all; the readers' release likewise. The PTX memory model orders that; racecheck counts an "
    "arrival for its own lane alone. Where every lane arrives (tests/test_sanitizers.py) it has "
    "nothing to report."
)
KNOWN = (
    Known(
        "racecheck", "gemm", "wgmma",
        re.compile(r"between Read access at Multiplier::read_factors\("),
        re.compile(r"and Write access at scale\("), _FACTORS,
    ),
    Known(
        "racecheck", "gemm", "wgmma",
        re.compile(r"between Write access at scale\("),
        re.compile(r"and Read access at Multiplier::read_factors\("), _FACTORS,
    ),
    Known(
        "racecheck", "gemm", "gluon",
        re.compile(r"between Read access at gemm_kernel\+0x[0-9a-f]{1,3} in "),
        re.compile(r"and Write access at gemm_kernel\+"),
        "What reads is among the function's first instructions: the dispatch by which Triton's "
        "compiler hands partitions and what they capture to warps. No code of the kernel.",
    ),
)  # fmt: skip


def sift(tool: Tool, op: str, kernel: str, said: str) -> tuple[str, int]:
    """What a tool said without the reports that are known, and how many of those there were."""
    mine = [k for k in KNOWN if (k.tool, k.op, k.kernel) == (tool, op, kernel)]
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
    """How cases are run for a tool to see the kernel's own accesses, and only these.

    To memcheck a guard zone is memory like any other; for initcheck nothing may be filled.
    """
    guarded = tool in ("racecheck", "synccheck")
    plain = Mode(host=True, initialised=tool != "initcheck")
    return plain if guarded else Mode(host=True, guard=0, initialised=plain.initialised)


@dataclass
class Session:
    """One worker's sanitizer, and how much of its log has been read."""

    tool: Tool

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._read = 0

    def command(self) -> list[str]:
        """What runs Python; every tensor is an allocation of its own.

        It waits as long as it takes until Python has imported torch and calls CUDA.
        """
        return [
            "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", find(), "--tool", self.tool,
            "--log-file", str(self._log), "--launch-timeout", "0", *_OPTIONS[self.tool],
        ]  # fmt: skip

    def said(self, wait_s: float = DELAY_S) -> str:
        """What is new and no mere banner, in one line; empty where nothing is wrong."""
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
