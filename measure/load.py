"""Other processes' load on a device while it is measured, and doubts about the figures."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetfire.core.device import Device
from jetfire.measure.nvml import Nvml
from jetfire.measure.results import Row, shape_text

BUSY = 0.1  # the share of a device's work that others may use
# The ratio of 80th to 20th percentile that is doubtful: of 1912 rows on a quiet H200 the widest has
# 1.11.
WIDE = 1.25
# The share of the roofline that is doubtful. A peak is a median too: of those rows one has 1.007.
ABOVE = 1.02


def _seconds() -> tuple[float, float] | None:
    """Return the seconds that this process's cores have worked, and their seconds in all.

    None where the system does not say.
    """
    try:
        wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open("/proc/stat") as file:
            lines = [words for words in map(str.split, file) if words and words[0] in wanted]
        # user, nice, system, idle, waiting for a disk, interrupts (2), stolen by other machines.
        times = [[int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:9]] for words in lines]
    except (AttributeError, OSError, ValueError):
        return None
    total = sum(map(sum, times))
    return total - sum(time[3] + time[4] for time in times), total


def _own_seconds() -> float:
    """Return the seconds that this process and all its descendants have worked."""
    spent = os.times()
    waited_for = spent.children_user + spent.children_system
    return time.process_time() + waited_for + _descendants_seconds(os.getpid())


def _descendants_seconds(process: int) -> float:
    """Return the seconds that a process's living descendants, and those they waited for, worked.

    0 where the system does not say.
    """
    children: dict[int, list[tuple[int, float]]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # After the program's name in brackets come state, parent, …; from the 12th on, the
            # ticks of the process, user and system, and those of children that it waited for.
            words = file.read_bytes().rpartition(b")")[2].split()
            seconds = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
            children.setdefault(int(words[1]), []).append((int(file.parent.name), seconds))
    total, parents = 0.0, [process]
    while parents:
        for child, seconds in children.get(parents.pop(), []):
            total += seconds
            parents.append(child)
    return total


class Load:
    """A watch of other processes' use of a device, from now on.

    Attributes:
        monitor: reads a GPU; None for a CPU, and where NVML cannot be reached.
        driver: the GPU's; None where there is no monitor.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.monitor = device, Nvml.open(device.torch_device)
        self._began, self._own = _seconds(), _own_seconds()
        self.driver = self.monitor.driver() if self.monitor else None
        share = self.monitor.utilisation() if self.monitor else None
        self._before = _crowd(device, share)

    @property
    def was_quiet(self) -> bool:
        """Whether others seemed to leave the device alone before this process used it."""
        return self._before is None

    def text(self) -> str | None:
        """Return one line on others' use of the device; None where it was little or is unknown."""
        now = _seconds()
        if self.device.kind == "cuda" or now is None or self._began is None:
            return self._before
        passed = now[1] - self._began[1]
        others = now[0] - self._began[0] - (_own_seconds() - self._own)
        if passed <= 0:
            return self._before
        share = others / passed
        return f"other processes used {share:.0%} of the CPU" if share > BUSY else None


def _crowd(device: Device, share: float | None) -> str | None:
    """Return one line on others' use of a device before this process uses it; None for little.

    A CPU's load is an average over a minute, to which this process or an earlier one contributes.

    Args:
        share: as `Nvml.utilisation` has it, of a GPU.
    """
    if device.kind == "cuda":
        return f"the GPU was {share:.0%} busy beforehand" if share and share > BUSY else None
    load = os.getloadavg()[0]
    return f"the load was {load:.1f} on {device.sms} cores" if load > device.sms / 2 else None


def doubts(rows: Sequence[Row], busy: str | None, peaks: Mapping[str, Any]) -> str | None:
    """Return one line on why figures are doubtful; None where nothing speaks against them.

    Args:
        busy: others' use of the device meanwhile, as `Load.text` returns it.
        peaks: the peaks of the rows' `roofline`.
    """
    reasons = [busy] if busy else []
    if peaks.get("busy"):
        reasons.append(f"when its peaks were measured {peaks['busy']}")
    spreads = [(row.ms_p80 / row.ms_p20, row) for row in rows if row.ms_p20 and row.ms_p80]
    if wide := [one for one in spreads if one[0] > WIDE]:
        spread, row = max(wide, key=lambda one: one[0])
        varying = f"{len(wide)} of {len(rows)} rows vary by more than {WIDE}× from p20 to p80"
        reasons.append(f"{varying}, {_name(row)} by {spread:.2f}×")
    highest = max(rows, key=lambda row: row.roofline or 0.0)
    if (highest.roofline or 0.0) > ABOVE:
        at = f"{_name(highest)} is at {highest.roofline:.0%} of the roofline"
        remedy = "--remeasure-peaks where nothing else runs"
        reasons.append(f"{at}, whose peaks were measured too low: {remedy}")
    return f"doubtful figures: {'; '.join(reasons)}" if reasons else None


def _name(row: Row) -> str:
    return f"{row.op} {row.label} {shape_text(row.problem, ())}"
