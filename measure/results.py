"""Result rows and the JSON file that holds them: `{"schema": 1, "device": …, "rows": […]}`.

A file to which rows were added has `runs` too: what the rows of other runs were measured with.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints
from typing_extensions import TypedDict

from jetfire.core import schema, terminal
from jetfire.core.errors import UsageError
from jetfire.core.files import MIB, Unreadable
from jetfire.core.problem import value_text
from jetfire.core.schema import Count, Fields, Line, Name, NotNegative, Plain, Text, also, most

SCHEMA = 1
# Bounds of a file: 740 bytes per row, where those of gemm on a GPU, the longest, have 630 in the
# mean. To parse the costliest file of 14 MiB takes 0.9 GiB and 3.7 s.
MOST, MOST_ROWS = 12 * MIB, 17_000
# What of a device's record is of the run, and not of the device: rows of several may be in a file.
RUN_FIELDS = (
    "driver",
    "cuda",
    "torch",
    "triton",
    "python",
    "jetfire",
    "timer",
    "commit",
    "time",
    "date",
)
CURVE_FIELDS = ("curve", "sqnr_db", "row_sqnr_db", "schedule_err")

# Bounds well within those of floats, so that no quotient of two measurements overflows: a time is
# from a femtosecond to thirty years.
Milliseconds = Annotated[float, Field(ge=1e-12, le=1e12)]
MOST_AMOUNT = 1e15
Amount = Annotated[float, Field(ge=0, le=MOST_AMOUNT)]
Ratio = Annotated[float, Field(ge=1e-15, le=1e15)]
Decibels = Annotated[float, Field(ge=-1e4, le=1e4)]
# A commit, and whether what was measured differed from it.
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40,64}\+?$")]
Gibibytes = Annotated[dict[Name, Amount | None], most(100)]
# Counters of a profiler (`measure.ncu`): each a number, but for the names of what was launched.
# Those of stalls are warps that wait for that reason, for each instruction that is issued.
LAUNCHED, STALL = "kernels", "stall_"


def _numbers(value: dict[str, Any]) -> dict[str, Any]:
    """Return counters as they are.

    Raises:
        ValueError: one is a text where it is to be a number, or the other way.
    """
    for name, entry in value.items():
        if isinstance(entry, str) != (name == LAUNCHED):
            raise ValueError(f"{name}: {'text' if name == LAUNCHED else 'a number'}")
    return value


Counters = Annotated[dict[Name, Amount | Line], most(100), AfterValidator(_numbers)]


class Peaks(TypedDict):
    """The best rates of a device, as `jetfire.measure.peaks` measures them.

    Attributes:
        copy_gbps: 1e9 bytes per second, read and written.
        int8_tops, bf16_tflops: 1e12 operations of the matrix unit per second.
        how: by peak, the measurement that gave it.
        busy: the disturbance; absent where there was none.
    """

    copy_gbps: Ratio
    int8_tops: Ratio
    bf16_tflops: Ratio
    how: NotRequired[Annotated[dict[Name, Line], most(100)]]
    busy: NotRequired[Line]


class DeviceRecord(TypedDict, total=False):
    """The device of a results file, as `jetfire.measure.provenance.device_record` makes it."""

    name: Line | None
    kind: Line | None
    driver: Line | None
    commit: Commit | None
    time: Line
    date: Line
    timer: Count
    peaks: Peaks | None


Record = Annotated[dict[Name, Plain], most(100), also(DeviceRecord)]


class Extra(TypedDict, total=False):
    """Fields that only some rows have.

    Times of stages in milliseconds, memory in GiB, and the counters of `measure.ncu`.
    """

    stages: Annotated[dict[Name, Milliseconds], most(100)]
    noise: Amount | None
    peak_gib: Amount | None
    activation_gib: Amount | None
    peer_peak_gib: Gibibytes
    peer_activation_gib: Gibibytes
    first_step_s: Amount | None
    alone: bool
    counters: Counters
    gathered_of_fp32: Amount | None


@dataclass(frozen=True)
class Row:
    """A result of one kernel, or one peer, at one problem; None where a field does not apply.

    Attributes:
        kernel: the kernel's name, or the peer's.
        role: a peer is timed beside the kernels and not checked.
        problem: the op's `Problem` as a dict.
        config: the kernel's `Config` as a dict; None for a peer.
        profile: the config's source; None where the user gave it, and for a peer.
        data: the distribution of the inputs.
        ok: the outputs agreed with the reference, before timing and after.
        rel_err: ‖out − reference‖/‖reference‖, the largest over the outputs.
        error: the fault in one line; empty where there was none.
        ms, ms_p20, ms_p80: milliseconds per call: median, 20th and 80th percentile of `samples`.
        tflops: 1e12 multiply-add operations of the matrix unit per second (two each).
        gbps: 1e9 bytes per second, of the fewest that the op must move.
        roofline: floor time over measured time, with the peaks that its run found.
        vs_peer: by peer, its time over this kernel's: above 1 the kernel is faster.
        sm_mhz: the SM clock during the samples.
        watts: board power over a run without pause.
        joules: watts × seconds per call.
        throttled: why the clock was held down; empty where it was not.
        graph: launches were replayed from a CUDA graph, so that none is in the figure.
        curve: the curve that this is a point of. It keeps the point apart from the same problem's
            other rows. None for most.
        sqnr_db: 10·log10(‖C‖²/‖out − C‖²), C in float64 from the inputs before they were quantised.
        row_sqnr_db: the median of the same over the rows of C.
        schedule_err: ‖out − C‖/‖C‖ in fp32, C in float64 from the quantised inputs.
        export: the form of the export that was measured. It keeps the row apart from the kernel's
            own. None for most.
        run: the key in the file's `runs` of what it was measured with; None where that is the
            file's `device`.
        extra: further fields: `stages` (name → ms) of a kernel that has several, `counters` of one
            that was profiled, and those of other commands (`peak_gib`, …), kept as they are.
    """

    op: Name
    kernel: Name
    role: Literal["kernel", "peer"]
    problem: Fields
    config: Fields | None = None
    profile: Name | None = None
    data: Line | None = None
    ok: bool | None = None
    rel_err: NotNegative | None = None
    error: Text = ""
    ms: Milliseconds | None = None
    ms_p20: Milliseconds | None = None
    ms_p80: Milliseconds | None = None
    samples: Count | None = None
    tflops: Amount | None = None
    gbps: Amount | None = None
    roofline: Amount | None = None
    vs_peer: Annotated[dict[Name, Ratio], most(100)] | None = None
    sm_mhz: Amount | None = None
    watts: Amount | None = None
    joules: Amount | None = None
    throttled: Annotated[list[Line], most(100)] | None = None
    graph: bool | None = None
    curve: Literal["promotion"] | None = None
    sqnr_db: Decibels | None = None
    row_sqnr_db: Decibels | None = None
    schedule_err: NotNegative | None = None
    export: Name | None = None
    run: Name | None = None
    extra: Annotated[dict[Name, Plain], most(100), also(Extra)] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it: extra fields beside the others, no NaN and no infinity.

        An error, which a kernel may have worded, is one line without control characters. Fields
        that only a curve's points have, or only exports, or rows of another run, are left out of
        other rows.
        """
        plain = dataclasses.asdict(self)
        plain["error"] = terminal.line(self.error)
        if self.curve is None:
            for name in CURVE_FIELDS:
                if plain[name] is None:
                    del plain[name]
        for name in ("export", "run"):
            if plain[name] is None:
                del plain[name]
        plain.update(plain.pop("extra"))
        return {name: _finite(value) for name, value in plain.items()}

    def key(self, config: bool = True) -> str:
        """Return the key that rows of one measurement share; a curve's point has any config."""
        chosen = self.config if config else None
        if self.curve is not None:
            chosen = {"schedule": self.schedule}
        parts = [self.op, self.kernel, self.problem, self.data, chosen, self.curve, self.export]
        return json.dumps(parts, sort_keys=True)

    @property
    def schedule(self) -> str | None:
        """The config's schedule, for a kernel that has several; else None."""
        return (self.config or {}).get("schedule")

    @property
    def label(self) -> str:
        """The kernel's name, with the schedule for a curve's point, or with an export's form."""
        if self.export is not None:
            return f"{self.kernel} as {self.export}"
        return f"{self.kernel} {self.schedule}" if self.curve and self.schedule else self.kernel


def _finite(value: Any) -> Any:
    """Round floats to six digits, more than any measurement has; NaN and infinity become None."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


_FIELDS = {f.name for f in dataclasses.fields(Row)} - {"extra"}


def _gathered(content: Any) -> Any:
    """Return a row of `Row.as_dict` with its further fields gathered as `extra`."""
    if not isinstance(content, dict):
        return content
    fields = {name: value for name, value in content.items() if name in _FIELDS}
    extra = {name: value for name, value in content.items() if name not in _FIELDS}
    return {"role": "kernel", **fields, "extra": extra}


def _ordered(row: Row) -> Row:
    """Return a row as it is.

    Raises:
        ValueError: its median is not between its percentiles.
    """
    if row.ms is not None and not (row.ms_p20 or row.ms) <= row.ms <= (row.ms_p80 or row.ms):
        raise ValueError("ms from ms_p20 to ms_p80")
    return row


SavedRow = Annotated[Row, BeforeValidator(_gathered), AfterValidator(_ordered)]


@dataclass(frozen=True)
class _File:
    device: Record | None
    rows: Annotated[list[SavedRow], Field(max_length=MOST_ROWS), FailFast()]
    runs: Annotated[dict[Name, Record], most(MOST_ROWS)] = field(default_factory=dict)


@dataclass
class Results:
    """The result rows of one device.

    Attributes:
        device: its record, of the run that the file was begun in or last added to.
        runs: of rows of other runs, the fields `RUN_FIELDS` of their records, as far as known.
    """

    device: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measured(self, row: Row) -> Mapping[str, Any]:
        """Return what a row was measured with: `RUN_FIELDS`, or the whole record of the device."""
        return self.device if row.run is None else self.runs[row.run]

    def merge(self, other: Results) -> None:
        """Add the rows of another run; a row with the key of one that is here replaces it.

        A config that a profile chose is not part of that key: an earlier row with another config
        is of a profile that is no longer in use.
        """

        def key_of(row: Row) -> str:
            return row.key(config=row.profile is None)

        records = {row.run: other.measured(row) for row in other.rows}
        runs = {run: self._run(record) for run, record in records.items()}
        at = {key_of(row): i for i, row in enumerate(self.rows)}
        for row in other.rows:
            key, added = key_of(row), dataclasses.replace(row, run=runs[row.run])
            if key in at:
                self.rows[at[key]] = added
            else:
                at[key] = len(self.rows)
                self.rows.append(added)

    def _run(self, record: Mapping[str, Any]) -> str | None:
        """Return the key of a run, which is added if it is new; None for that of `device`."""
        own, run = (
            {name: of[name] for name in RUN_FIELDS if name in of} for of in (self.device, record)
        )
        if run == own:
            return None
        key = hashlib.sha256(json.dumps(run).encode()).hexdigest()[:8]
        self.runs[key] = run
        return key

    def as_dict(self) -> dict[str, Any]:
        """Return what `to_json` writes."""
        rows = [row.as_dict() for row in self.rows]
        head = {"schema": SCHEMA, "device": _finite(self.device)}
        runs = self._used()
        return {**head, "runs": runs, "rows": rows} if runs else {**head, "rows": rows}

    def _used(self) -> dict[str, dict[str, Any]]:
        """Return the runs that there are rows of."""
        used = {row.run for row in self.rows}
        return {key: self.runs[key] for key in sorted(self.runs) if key in used}

    def to_json(self) -> str:
        """Return JSON with a line per row, so that files of two thousand can be read and compared.

        Raises:
            UsageError: there is more than `load` takes.
        """
        rows = [json.dumps(row.as_dict(), allow_nan=False) for row in self.rows]
        device = json.dumps(_finite(self.device), indent=1, allow_nan=False)
        lines = ",\n".join(rows)
        runs = ",\n".join(f'"{key}": {json.dumps(run)}' for key, run in self._used().items())
        head = f'{{"schema": {SCHEMA},\n"device": {device},\n'
        between = f'"runs": {{\n{runs}\n}},\n' if runs else ""
        text = f'{head}{between}"rows": [\n{lines}\n]}}\n'
        if len(rows) > MOST_ROWS or len(text) > MOST:  # JSON is ASCII here: characters are bytes
            raise UsageError(
                f"{len(rows)} rows in {len(text)} bytes: a results file holds at most {MOST_ROWS} "
                f"in {MOST}: give another file, or measure less"
            )
        return text

    def to_csv(self) -> str:
        """Return CSV with a line per row, and columns such as `problem.m` and `config.tile_m`."""
        rows = [row.as_dict() for row in self.rows]
        fields = ("config", "vs_peer")  # of which a row without them has no columns
        return as_csv(
            [{k: v for k, v in row.items() if k not in fields or v is not None} for row in rows]
        )

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a results file.

        Raises:
            Unreadable: it cannot be read, is no results file, or is of another schema.
        """
        content = schema.load(path, _File, MOST, SCHEMA)
        for number, row in enumerate(content.rows):
            if row.run is not None and row.run not in content.runs:
                raise Unreadable(path, f"rows.{number}.run={row.run!r}: it is not in runs")
        return cls(content.device or {}, content.rows, content.runs)


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per record, with columns such as ``problem.m`` for what lies in a field."""
    if not records:
        return ""
    lines = [dict(_flat(record)) for record in records]
    out = io.StringIO()
    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _flat(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            listed = isinstance(value, list | tuple)
            yield f"{before}{name}", "; ".join(map(str, value)) if listed else value


def problem_text(problem: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value_text(value)}" for name, value in problem.items())


def shape_text(problem: Mapping[str, Any], fields: Iterable[str]) -> str:
    """Return ``4096×4096×4096 block=32``: the sizes, then the given fields that are no sizes."""
    sizes = "×".join(str(problem[dim]) for dim in ("m", "n", "k") if dim in problem)
    named = [name for name in fields if name in problem and name not in ("m", "n", "k")]
    rest = {name: problem[name] for name in named}
    return " ".join(text for text in (sizes, problem_text(rest)) if text)


def blocks_text(problem: Mapping[str, Any]) -> str:
    """Return ``128``, or ``128→32`` where the codes that are written have another block."""
    return "→".join(str(problem[name]) for name in ("block", "out_block") if name in problem)
