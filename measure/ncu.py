"""Nsight Compute: a checked kernel runs once more under it, and its counters say why it is fast.

`ncu` starts `jetfire.measure.once`, which checks the kernel and then runs it with CUDA's profiler
on. What it launches between is counted, with caches cold and the clock left alone.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core import doctor, processes
from jetfire.core.errors import NoDeviceError
from jetfire.core.terminal import line, visible
from jetfire.measure.results import LAUNCHED, MOST_AMOUNT, STALL

if TYPE_CHECKING:
    from jetfire.core.device import Device
    from jetfire.measure.plan import Case
    from jetfire.measure.results import Row

OPTION = "--profile ncu"
TIMEOUT_S = 300.0  # of a kernel: it is compiled and checked first, and each pass runs it anew
MOST_LOG = 16 * 2**20  # bytes of what ncu prints
MOST_NAME, MOST_NAMES = 100, 10  # characters of a kernel's name, and how many are kept
TRIES = 3  # of ncu, each without the metrics that it did not know the time before
OPTIONS = (
    *("--config-file", "off", "--target-processes", "application-only"),
    *("--profile-from-start", "off", "--replay-mode", "kernel"),
    *("--cache-control", "all", "--clock-control", "none"),
    *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function"),
)
# Counter → three things. The metrics that say it: the first that ncu knows is asked for. How the
# values of several launches become one. The factor from the metric's unit to the counter's.
_SUM, _MEAN, _MOST, _LEAST = "sum", "mean", "most", "least"
_PEAK = "avg.pct_of_peak_sustained"
METRICS: dict[str, tuple[tuple[str, ...], str, float]] = {
    "duration_ms": (("gpu__time_duration.sum",), _SUM, 1e-6),
    "sm_pct": ((f"sm__throughput.{_PEAK}_elapsed",), _MEAN, 1.0),
    "memory_pct": ((f"gpu__compute_memory_throughput.{_PEAK}_elapsed",), _MEAN, 1.0),
    "l1_pct": ((f"l1tex__throughput.{_PEAK}_active",), _MEAN, 1.0),
    "l2_pct": ((f"lts__throughput.{_PEAK}_elapsed",), _MEAN, 1.0),
    "dram_pct": (
        (f"gpu__dram_throughput.{_PEAK}_elapsed", f"dram__throughput.{_PEAK}_elapsed"),
        _MEAN,
        1.0,
    ),
    "tensor_pct": (
        (
            f"sm__pipe_tensor_cycles_active.{_PEAK}_active",
            f"sm__inst_executed_pipe_tensor.{_PEAK}_active",
        ),
        _MEAN,
        1.0,
    ),
    "occupancy_pct": ((f"sm__warps_active.{_PEAK}_active",), _MEAN, 1.0),
    "dram_read_bytes": (("dram__bytes_read.sum",), _SUM, 1.0),
    "dram_write_bytes": (("dram__bytes_write.sum",), _SUM, 1.0),
    "l2_bytes": (("lts__t_bytes.sum",), _SUM, 1.0),
    "bank_conflicts": (("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",), _SUM, 1.0),
    "registers": (("launch__registers_per_thread",), _MOST, 1.0),
    "limit_registers": (("launch__occupancy_limit_registers",), _LEAST, 1.0),
    "limit_shared": (("launch__occupancy_limit_shared_mem",), _LEAST, 1.0),
    "limit_warps": (("launch__occupancy_limit_warps",), _LEAST, 1.0),
    "limit_blocks": (("launch__occupancy_limit_blocks",), _LEAST, 1.0),
}
# What a stalled warp waits for (Nsight Compute's documentation, "Warp Stall Reasons"). Each
# architecture has its own of these; ncu is asked which.
REASONS = {
    "barrier": "other warps at a barrier",
    "branch_resolving": "a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "its last stores",
    "gmma": "the registers of a wgmma",
    "imc_miss": "constants that no cache has",
    "lg_throttle": "the queue of global memory",
    "long_scoreboard": "global or local memory",
    "math_pipe_throttle": "a math pipe",
    "membar": "a memory barrier",
    "mio_throttle": "the queue of shared memory",
    "misc": "other things",
    "no_instruction": "the next instruction",
    "not_selected": "its turn",
    "short_scoreboard": "shared memory",
    "sleeping": "its sleep",
    "tex_throttle": "the queue of textures",
    "wait": "a fixed latency",
}
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active"
_STALL = re.compile(_STALLED.format("((?!\\w*_not_issued)[a-z0-9_]+?)") + r"(?:\.ratio)?")
_METRIC = re.compile(r'^"?([a-z0-9]+__[a-z0-9_]+)\b', re.MULTILINE)
_NUMBER = re.compile(r"\s*([+-]?[0-9][0-9,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(?:\(.*)?")
# What a unit is worth in the base unit, which older versions do not always print.
_UNITS = {
    **{f"{prefix}byte": 1e3**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{"usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9},
}


class ProfilingError(Exception):
    """Why a kernel's counters could not be read, in one line."""


@dataclass(frozen=True)
class CountedLaunch:
    """One launch of a kernel's, with what ncu counted, by metric and in base units."""

    kernel: str
    values: Mapping[str, float]


def number(text: str, unit: str = "") -> float | None:
    """Return a value in its base unit; None where there is none, as in ``n/a``."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    value = float(found[1].replace(",", "")) * _UNITS.get(unit.strip(), 1.0)
    return value if 0 <= value <= MOST_AMOUNT else None


def parse(text: str) -> list[CountedLaunch]:
    """Return the launches of ncu's CSV, among whatever else it prints.

    A launch is a line whose columns are metrics, below a line of units; or, as older versions have
    it, a line for each metric.

    Raises:
        ProfilingError: the CSV is broken.
    """
    lines = [one for one in text.splitlines() if one and not one.startswith("==")]
    heads = (i for i, one in enumerate(lines) if re.match('"?ID"?,', one) and "Kernel Name" in one)
    start = next(heads, None)
    if start is None:
        return []
    try:
        head, *rows = csv.reader(lines[start:])
    except csv.Error as error:
        raise ProfilingError(f"ncu's CSV cannot be read: {error}") from None
    known = [dict(zip(head, row, strict=False)) for row in rows if len(row) >= 2]
    if "Metric Name" in head:
        return _by_metric(known)
    units = known.pop(0) if known and not known[0].get("ID") else {}
    return [
        CountedLaunch(row.get("Kernel Name", ""), dict(_values(row.items(), units)))
        for row in known
        if row.get("ID")
    ]


def _values(
    items: Iterable[tuple[str, str]], units: Mapping[str, str]
) -> Iterator[tuple[str, float]]:
    """Yield the metrics among the columns of a launch that have a value."""
    for name, text in items:
        value = number(text, units.get(name, "")) if "__" in name else None
        if value is not None:
            yield name, value


def _by_metric(rows: Sequence[Mapping[str, str]]) -> list[CountedLaunch]:
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        name = row.get("Metric Name", "")
        _, values = found.setdefault(row["ID"], (row.get("Kernel Name", ""), {}))
        unit = {name: row.get("Metric Unit", "")}
        values.update(_values([(name, row.get("Metric Value", ""))], unit))
    return [CountedLaunch(kernel, values) for kernel, values in found.values()]


def counters(launches: Sequence[CountedLaunch], nbytes: int) -> dict[str, Any]:
    """Return the counters of a row, of all its launches together.

    Times and traffic are added; shares and stall ratios are means, weighted by time. What one of
    the launches lacks is left out, as are stalls that never came.

    Args:
        nbytes: the bytes that the op must move (`Op.bytes`).
    """
    found: dict[str, Any] = {LAUNCHED: _names(launches)}
    durations = [one.values.get("gpu__time_duration.sum", 0.0) for one in launches]
    weights = durations if min(durations) > 0 else [1.0] * len(launches)
    for name, (metrics, how, unit) in METRICS.items():
        values = next(filter(None, (_each(launches, metric) for metric in metrics)), None)
        if values is not None:
            found[name] = _together(values, weights, how) * unit
    reasons = dict.fromkeys(
        (match[1], metric)
        for one in launches
        for metric in one.values
        if (match := _STALL.fullmatch(metric))
    )
    stalls = {
        f"{STALL}{reason}": _together(values, weights, _MEAN)
        for reason, metric in reasons
        if (values := _each(launches, metric))
    }
    found |= {name: value for name, value in sorted(stalls.items()) if value > 0}
    ways = [f"dram_{way}_bytes" for way in ("read", "write")]
    if nbytes > 0 and all(way in found for way in ways):
        found["dram_of_counted"] = min(MOST_AMOUNT, sum(found[way] for way in ways) / nbytes)
    return found


def _each(launches: Sequence[CountedLaunch], metric: str) -> list[float] | None:
    """Return each launch's value of a metric; None where one lacks it."""
    values = [one.values[metric] for one in launches if metric in one.values]
    return values if len(values) == len(launches) else None


def _together(values: Sequence[float], weights: Sequence[float], how: str) -> float:
    if how == _MEAN:
        parts = zip(values, weights, strict=True)
        return min(MOST_AMOUNT, math.fsum(v * w for v, w in parts) / math.fsum(weights))
    found = {_SUM: math.fsum(values), _MOST: max(values), _LEAST: min(values)}
    return min(MOST_AMOUNT, found[how])


def _names(launches: Sequence[CountedLaunch]) -> str:
    """Return the launched functions in their order: ``first ×2, second``."""
    names = (visible(" ".join(one.kernel.split())) for one in launches)
    counted = Counter(name[:MOST_NAME] or "?" for name in names)
    texts = [f"{name} ×{n}" if n > 1 else name for name, n in counted.items()]
    more = [f"and {len(texts) - MOST_NAMES} more"] if len(texts) > MOST_NAMES else []
    return ", ".join([*texts[:MOST_NAMES], *more])


def check(device: str) -> None:
    """Refuse a CPU, and a machine without ncu, before torch is loaded.

    Raises:
        NoDeviceError: it says which, and what to do.
    """
    if device == "cpu":
        raise NoDeviceError(f"{OPTION}: counters are a GPU's: expected --device cuda")
    try:
        doctor.ncu()
    except doctor.BrokenError as error:
        raise NoDeviceError(f"{OPTION}: {error}: {error.remedy}") from None


@dataclass(frozen=True)
class Ncu:
    """An ncu that has been seen to read the counters of a device.

    Attributes:
        device: as `Device.parse` takes it.
        metrics: what it is asked for.
    """

    device: str
    metrics: Sequence[str]

    @classmethod
    def begun(cls, device: Device) -> Ncu:
        """Return it once a launch of torch's was counted.

        Raises:
            NoDeviceError: the device is a CPU, or its counters cannot be read, with the remedy.
        """
        if device.kind != "cuda":
            raise NoDeviceError(f"{OPTION}: counters are a GPU's, and this is {device.label}")
        return cls._tried(f"cuda:{device.index}")

    @classmethod
    def _tried(cls, device: str) -> Ncu:
        spec = {"device": device}
        asked = wanted(_known())
        try:
            for _ in range(TRIES):
                said = _run(spec, asked)
                if said.launches or not (unknown := said.unknown(asked)):
                    break
                asked = [metric for metric in asked if metric not in unknown]
            if not any("dram__bytes_read.sum" in one.values for one in said.launches):
                raise ProfilingError(said.reason())
        except ProfilingError as error:
            raise NoDeviceError(f"{OPTION}: {error}") from None
        return cls(device, asked)

    def count(
        self, case: Case, kernel: str, config: Mapping[str, Any], seed: int, data: str
    ) -> dict[str, Any]:
        """Return the counters of a kernel, which is checked and run once more.

        Raises:
            ProfilingError: there are none.
        """
        spec = {
            "device": self.device,
            "op": case.op.name,
            "kernel": kernel,
            "problem": case.problem.as_dict(),
            "config": dict(config),
            "seed": seed,
            "data": data,
        }
        said = _run(spec, self.metrics)
        if not said.launches or said.code:
            raise ProfilingError(said.reason())
        return counters(said.launches, case.op.bytes(case.problem))

    def rows(
        self, rows: Sequence[Row], case: Case, seed: int, data: str, note: Callable[[str], object]
    ) -> list[Row]:
        """Return rows with the counters of each kernel that was timed; what has none is noted."""
        found = []
        for row in rows:
            if row.role == "kernel" and row.ok and row.ms is not None:
                try:
                    counted = self.count(case, row.kernel, row.config or {}, seed, data)
                    row = replace(row, extra={**row.extra, "counters": counted})
                except ProfilingError as error:
                    note(f"{case}: {row.label}: not profiled: {error}")
            found.append(row)
        return found


@dataclass(frozen=True)
class _Said:
    """What came of one run of ncu: its launches, its log, and what the program under it printed."""

    launches: Sequence[CountedLaunch]
    log: str
    printed: str
    code: int

    def errors(self) -> list[str]:
        texts = [one for text in (self.log, self.printed) for one in text.splitlines()]
        return [one for one in texts if one.startswith(("==ERROR==", "==WARNING=="))]

    def unknown(self, metrics: Sequence[str]) -> set[str]:
        """Return those of the metrics that an error names."""
        said = "\n".join(self.errors())
        return {metric for metric in metrics if re.search(rf"\b{re.escape(metric)}(?!\w)", said)}

    def reason(self) -> str:
        """Return why nothing was counted: what the driver forbids, else what was said last."""
        said = self.errors()
        if any("ERR_NVGPUCTRPERM" in one for one in said):
            return f"this user may not read the GPU's counters (ERR_NVGPUCTRPERM): {doctor.PERMIT}"
        ours = [one for one in self.printed.splitlines() if one.startswith("jetfire: ")]
        if ours:
            return line(ours[-1].removeprefix("jetfire: "))
        errors = [one for one in said if one.startswith("==ERROR==")]
        last = [*errors, *said, *self.printed.splitlines()[-1:]][:1]
        what = line(re.sub("^==[A-Z]+== *", "", "".join(last))) or "no kernel was counted"
        return f"{what} (ncu: exit code {self.code})"


def wanted(known: set[str]) -> list[str]:
    """Return the metrics to ask for, of those that ncu knows; of all, where it does not say."""
    if not known:
        stalls = [f"{_STALLED.format(reason)}.ratio" for reason in (*REASONS, "selected")]
        return [metrics[0] for metrics, _, _ in METRICS.values()] + stalls
    found = []
    for metrics, _, _ in METRICS.values():
        there = [m for m in metrics if m.startswith("launch__") or m.partition(".")[0] in known]
        found += there[:1]
    return found + [f"{name}.ratio" for name in sorted(known) if _STALL.fullmatch(name)]


def _known() -> set[str]:
    """Return the metrics that ncu lists for the GPUs here, without suffixes; empty if it fails."""
    try:
        done = subprocess.run(
            ["ncu", "--config-file", "off", "--query-metrics"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(_METRIC.findall(done.stdout[:MOST_LOG]))


def _run(spec: Mapping[str, Any], metrics: Sequence[str]) -> _Said:
    """Run what a `once.RunSpec` says under ncu.

    Raises:
        ProfilingError: ncu cannot be started, took too long, or printed no CSV that can be read.
    """
    with tempfile.TemporaryDirectory(prefix="jetfire-ncu-") as folder:
        log = Path(folder, "log")
        child = [sys.executable, "-m", "jetfire.measure.once", json.dumps(spec)]
        options = [*OPTIONS, "--log-file", str(log), "--metrics", ",".join(metrics)]
        process = processes.started(["ncu", *options, *child], dict(os.environ))
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProfilingError(f"ncu took more than {TIMEOUT_S:g} s") from None
        finally:
            processes.killed(process)
        text = ""
        if log.exists():
            with log.open(errors="replace", newline="") as file:
                text = file.read(MOST_LOG)
        said = _Said((), text, printed[-MOST_LOG:], process.returncode)
        return replace(said, launches=parse(text) or parse(said.printed))
