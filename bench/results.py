"""Result rows and the JSON file that holds them: `{"schema": 1, "device": …, "rows": […]}`."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jetfire.ops.errors import UsageError

SCHEMA = 1
CURVE_FIELDS = ("curve", "sqnr_db", "row_sqnr_db", "schedule_err")


@dataclass(frozen=True)
class Row:
    """One kernel, or one peer, at one problem; None where a field does not apply.

    Attributes:
        kernel: the kernel's name, or the peer's.
        role: a peer is timed beside the kernels and not checked.
        problem: the op's `Problem` as a dict.
        config: the kernel's `Config` as a dict; None for a peer.
        profile: where the config came from; None where the user gave it, and for a peer.
        data: the distribution of the inputs.
        ok: the outputs agreed with the reference, before timing and after.
        rel_err: ‖out − reference‖/‖reference‖, the largest over the outputs.
        error: what was wrong, in one line; empty where nothing was.
        ms, ms_p20, ms_p80: milliseconds a call: median, 20th and 80th percentile of `samples`.
        tflops: 1e12 multiply-add operations of the matrix unit a second (two each).
        gbps: 1e9 bytes a second, of the fewest that the op must move.
        roofline: floor time over measured time, with the peaks of the file's device.
        vs_peer: peer → its time over this kernel's: above 1 the kernel is faster.
        sm_mhz: the SM clock during the samples.
        watts: board power over a run without pause.
        joules: watts × seconds a call.
        throttled: what held the clock down; empty where nothing did.
        graph: launches were replayed from a CUDA graph, so that none is in the figure.
        curve: the curve that this is a point of, which keeps it apart from the same problem's other
            rows; None for most.
        sqnr_db: 10·log10(‖C‖²/‖out − C‖²), C in float64 from the inputs before they were quantised.
        row_sqnr_db: the same of each row of C: the median.
        schedule_err: ‖out − C‖/‖C‖ in fp32, C in float64 from the quantised inputs.
        export: the form in which the kernel was exported, where it is an export that was measured,
            which keeps it apart from the kernel's own row; None for most.
        extra: further fields: `stages` (name → ms) of a kernel that has several, and those of other
            commands (`peak_gib`, …), kept as they are.
    """

    op: str
    kernel: str
    role: Literal["kernel", "peer"]
    problem: dict[str, Any]
    config: dict[str, Any] | None = None
    profile: str | None = None
    data: str | None = None
    ok: bool | None = None
    rel_err: float | None = None
    error: str = ""
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    samples: int | None = None
    tflops: float | None = None
    gbps: float | None = None
    roofline: float | None = None
    vs_peer: dict[str, float] | None = None
    sm_mhz: float | None = None
    watts: float | None = None
    joules: float | None = None
    throttled: list[str] | None = None
    graph: bool | None = None
    curve: Literal["promotion"] | None = None
    sqnr_db: float | None = None
    row_sqnr_db: float | None = None
    schedule_err: float | None = None
    export: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: extra fields beside the others, no NaN and no infinity.

        What only a curve's points, or only exports, have is left out of other rows.
        """
        plain = dataclasses.asdict(self)
        if self.curve is None:
            for name in CURVE_FIELDS:
                if plain[name] is None:
                    del plain[name]
        if self.export is None:
            del plain["export"]
        plain.update(plain.pop("extra"))
        return {name: _finite(value) for name, value in plain.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        fields = {name: value for name, value in content.items() if name in known}
        fields.setdefault("role", "kernel")
        extra = {name: value for name, value in content.items() if name not in known}
        if not isinstance(fields.get("problem"), dict):
            raise TypeError(f"problem is {fields.get('problem')!r}")
        for name in ("ms", "ms_p20", "ms_p80"):
            if not isinstance(fields.get(name), int | float | None):
                raise TypeError(f"{name} is {fields[name]!r}")
        return cls(**fields, extra=extra)

    def key(self, config: bool = True) -> str:
        """What makes two rows measurements of the same thing; a curve's point has any config."""
        chosen = self.config if config else None
        if self.curve is not None:
            chosen = {"schedule": self.schedule}
        parts = [self.op, self.kernel, self.problem, self.data, chosen, self.curve,
                 self.export]  # fmt: skip
        return json.dumps(parts, sort_keys=True)

    @property
    def schedule(self) -> str | None:
        """Of a kernel that has a choice of schedules."""
        return (self.config or {}).get("schedule")

    @property
    def label(self) -> str:
        """The kernel's name, with the schedule where measured with each, or an export's form."""
        if self.export is not None:
            return f"{self.kernel} as {self.export}"
        return f"{self.kernel} {self.schedule}" if self.curve and self.schedule else self.kernel


def _finite(value: Any) -> Any:
    """Six digits are more than any measurement has; no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass
class Results:
    """The rows of one device."""

    device: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def merge(self, rows: Iterable[Row]) -> None:
        """Add rows; one that measures what a row here does takes its place."""
        at = {row.key(): i for i, row in enumerate(self.rows)}
        for row in rows:
            key = row.key()
            if key in at:
                self.rows[at[key]] = row
            else:
                at[key] = len(self.rows)
                self.rows.append(row)

    def to_json(self) -> str:
        """A row a line, so that a file of two thousand can be read and compared."""
        rows = [json.dumps(row.as_dict(), allow_nan=False) for row in self.rows]
        device = json.dumps(_finite(self.device), indent=1, allow_nan=False)
        lines = ",\n".join(rows)
        return f'{{"schema": {SCHEMA},\n"device": {device},\n"rows": [\n{lines}\n]}}\n'

    def to_csv(self) -> str:
        """A row a line; the problem's and the config's fields as `problem.m`, `config.tile_m`, …"""
        flat = [_flatten(row) for row in self.rows]
        columns = list(dict.fromkeys(name for row in flat for name in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return out.getvalue()

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a results file.

        Raises:
            UsageError: it cannot be read, is no results file, or is of a newer schema.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{path}: not JSON: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            raise UsageError(f"{path}: no results file: expected an object with schema and rows")
        if content.get("schema") != SCHEMA:
            raise UsageError(
                f"{path}: schema {content.get('schema')}: this version reads schema {SCHEMA}"
            )
        try:
            rows = [Row.from_dict(row) for row in content["rows"]]
            for row in rows:
                row.key()
        except (TypeError, AttributeError) as error:
            raise UsageError(f"{path}: a row is not as expected: {error}") from None
        return cls(content.get("device") or {}, rows)


def _flatten(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.as_dict().items():
        if isinstance(value, dict) or name in ("problem", "config", "vs_peer"):
            flat.update({f"{name}.{key}": entry for key, entry in (value or {}).items()})
        else:
            flat[name] = "; ".join(value) if isinstance(value, list) else value
    return flat


def check_writable(path: Path) -> None:
    """Fail before an hour of measuring rather than after it.

    Raises:
        UsageError: a file cannot be written there.
    """
    if path.is_dir():
        raise UsageError(f"{path}: is a folder: expected a file to write")
    try:
        if path.is_fifo():
            return  # opening it would wait for who reads it
        if path.exists() and not path.is_file():
            path.open("a").close()
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise UsageError(f"{path}: cannot be written: permission denied")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def check_output(option: str, path: Path | None, *suffixes: str) -> None:
    """Fail before an hour of measuring where an option's file is of no such kind or not writable.

    Args:
        path: None where the option was not given.
        suffixes: those that its name may have.

    Raises:
        UsageError: it says what is expected.
    """
    if path is None:
        return
    if not path.name.lower().endswith(suffixes):
        kinds = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise UsageError(f"{option} {path}: expected a file named {kinds}")
    check_writable(path)


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none: to a temporary one beside it, then renamed."""
    if path.exists() and not path.is_file():  # a device or a pipe cannot be renamed over
        path.write_text(text, encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
