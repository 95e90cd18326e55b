"""Peaks and times that the package holds, of the devices whose results are committed.

docs/results/ is not shipped. `python -m jetfire.bench.records`, which `make report` runs, writes
two files anew from what is there: `peaks.json`, and `rows.json` with, of each problem, the fastest
kernel and its peers. Of one device the results of the shortest name count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from jetfire.core import registry, schema
from jetfire.core.errors import JetfireError, UsageError
from jetfire.core.files import write
from jetfire.core.schema import Fields, Line, Name, most
from jetfire.measure.results import MOST_ROWS, Milliseconds, Peaks, Results, Row

T = TypeVar("T")
SCHEMA = 1
PACKAGE = Path(__file__).parent.parent
PEAKS, ROWS = PACKAGE / "measure" / "peaks.json", PACKAGE / "measure" / "rows.json"
RESULTS = PACKAGE / "docs" / "results"
OTHERS = ("study-*", "*-lookups.json")  # records of studies and of lookups, beside the results


@dataclass(frozen=True)
class ShippedPeaks:
    """A device's peaks.

    Attributes:
        name: the device's, as torch has it.
        source: the results file that they are of.
    """

    name: Line
    source: Name
    peaks: Peaks


@dataclass(frozen=True)
class ShippedRow:
    """The time of a problem's fastest kernel, and of its peers in the same run.

    Attributes:
        problem: the op's `Problem` as a dict.
        ms: milliseconds per call; peers: theirs.
    """

    op: Name
    problem: Fields
    kernel: Name
    ms: Milliseconds
    peers: Annotated[dict[Name, Milliseconds], most(100)] = field(default_factory=dict)


@dataclass(frozen=True)
class ShippedRows:
    """A device's rows; `name` and `source` as in `ShippedPeaks`."""

    name: Line
    capability: tuple[int, int]
    source: Name
    rows: Annotated[list[ShippedRow], Field(max_length=MOST_ROWS)]

    def by_problem(self) -> dict[tuple[str, Any], ShippedRow]:
        """Return the rows by op and `Problem`."""
        return {(row.op, registry.get(row.op).Problem.parse(row.problem)): row for row in self.rows}


@dataclass(frozen=True)
class _Peaks:
    devices: Annotated[list[ShippedPeaks], Field(max_length=1000)]


@dataclass(frozen=True)
class _Rows:
    devices: Annotated[list[ShippedRows], Field(max_length=1000)]


@cache
def peaks() -> dict[str, ShippedPeaks]:
    """Return the shipped peaks by device; Unreadable where the package's file is damaged."""
    return {one.name: one for one in schema.load(PEAKS, _Peaks, version=SCHEMA).devices}


@cache
def rows() -> dict[str, ShippedRows]:
    """Return the shipped rows by device; Unreadable where the package's file is damaged."""
    return {one.name: one for one in schema.load(ROWS, _Rows, version=SCHEMA).devices}


def _of_devices(folder: Path, what: str, made: Callable[[str, Results], T | None]) -> list[T]:
    """Return what is made for each device with results in a folder.

    Args:
        made: makes it of the file's name and the results; None where these have none.

    Raises:
        UsageError: nothing is made, or results cannot be read.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: (len(path.name), path.name))
    found: dict[str, T] = {}
    for file in files:
        if not any(map(file.match, OTHERS)):
            results = Results.load(file)
            name = results.device.get("name")
            if name and name not in found and (one := made(file.name, results)) is not None:
                found[name] = one
    if not found:
        raise UsageError(f"{folder}: expected results with {what}")
    return list(found.values())


def peaks_text(folder: Path) -> str:
    """Return what `PEAKS` holds where a folder has these results."""

    def peaks(file: str, results: Results) -> dict[str, Any] | None:
        name, measured = results.device["name"], results.device.get("peaks")
        return {"name": name, "source": file, "peaks": measured} if measured else None

    devices = _of_devices(folder, "peaks", peaks)
    return json.dumps({"schema": SCHEMA, "devices": devices}, indent=1) + "\n"


def rows_text(folder: Path) -> str:
    """Return what `ROWS` holds where a folder has these results: a line per row."""

    def text(file: str, results: Results) -> str | None:
        device, fastest = results.device, _fastest(results)
        if not (fastest and device.get("capability")):
            return None
        head = {"name": device["name"], "capability": device["capability"], "source": file}
        lines = ",\n".join(map(_line, fastest))
        return f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}'

    devices = ",\n".join(_of_devices(folder, "rows", text))
    return f'{{"schema": {SCHEMA}, "devices": [\n{devices}\n]}}\n'


def _fastest(results: Results) -> list[Row]:
    """Return of each problem of an op the row of the fastest kernel; not of curves or exports."""
    found: dict[str, Row] = {}
    for row in results.rows:
        plain = row.curve is None and row.export is None and row.data in (None, "normal")
        if row.role == "kernel" and row.ok and row.ms and plain and row.op in registry.names():
            key = json.dumps([row.op, row.problem], sort_keys=True)
            if key not in found or row.ms < (found[key].ms or 0):
                found[key] = row
    return list(found.values())


def _line(row: Row) -> str:
    """Return a row as JSON, with the peers that do the op's own work, to the digits that repeat."""
    ms, ratios = row.ms or 0.0, row.vs_peer or {}
    peers = {name: float(f"{by * ms:.4g}") for name, by in ratios.items() if name != "copy"}
    shown = {"op": row.op, "problem": row.problem, "kernel": row.kernel, "ms": float(f"{ms:.4g}")}
    return json.dumps({**shown, "peers": peers})


def main() -> int:
    """Write each file where it would change, say so, and return an exit code."""
    for file, text_of in ((PEAKS, peaks_text), (ROWS, rows_text)):
        try:
            text = text_of(RESULTS)
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                write(file, text)
                print(f"{file}: written")
        except JetfireError as error:
            print(f"jetfire: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
