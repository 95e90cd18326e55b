"""Times of the kernels whose results are committed: `rows.json`, which the package holds.

docs/results/ is not shipped. `python -m jetfire.bench.shipped_rows`, which `make report` runs,
writes the file anew from what is there: of each problem the fastest kernel, and its peers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jetfire.bench.shipped_peaks import RESULTS, renewed, result_files
from jetfire.core import registry, schema
from jetfire.core.errors import UsageError
from jetfire.core.schema import Fields, Line, Name, most
from jetfire.measure.results import MOST_ROWS, Milliseconds, Results, Row

SCHEMA = 1
FILE = Path(__file__).parent.parent / "measure" / "rows.json"
# What rounds a time to the digits that repeat.
_DIGITS = "{:.4g}"


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
    """A device's rows.

    Attributes:
        name: the device's, as torch has it; capability: its compute capability.
        source: the results file that they are of.
    """

    name: Line
    capability: tuple[int, int]
    source: Name
    rows: Annotated[list[ShippedRow], Field(max_length=MOST_ROWS)]

    def by_problem(self) -> dict[tuple[str, Any], ShippedRow]:
        """Return the rows by op and `Problem`."""
        return {(row.op, registry.get(row.op).Problem.parse(row.problem)): row for row in self.rows}


@dataclass(frozen=True)
class _File:
    devices: Annotated[list[ShippedRows], Field(max_length=1000)]


@cache
def every() -> dict[str, ShippedRows]:
    """Return the shipped rows by device.

    Raises:
        Unreadable: the package's file is damaged.
    """
    return {one.name: one for one in schema.load(FILE, _File, version=SCHEMA).devices}


def text_of(folder: Path) -> str:
    """Return what `FILE` holds where a folder has these results; of one device the shortest name.

    Raises:
        UsageError: none of them has rows, or one cannot be read.
    """
    found: dict[str, str] = {}
    for file in result_files(folder):
        results = Results.load(file)
        name, capability = (results.device.get(key) for key in ("name", "capability"))
        if name and capability and name not in found and (fastest := _fastest(results)):
            head = {"name": name, "capability": capability, "source": file.name}
            lines = ",\n".join(map(_line, fastest.values()))
            found[name] = f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}'
    if not found:
        raise UsageError(f"{folder}: expected results with rows")
    devices = ",\n".join(found.values())
    return f'{{"schema": {SCHEMA}, "devices": [\n{devices}\n]}}\n'


def _fastest(results: Results) -> dict[str, Row]:
    """Return of each problem of an op the row of the fastest kernel; not of curves or exports."""
    found: dict[str, Row] = {}
    for row in results.rows:
        plain = row.curve is None and row.export is None and row.data in (None, "normal")
        if row.role == "kernel" and row.ok and row.ms and plain and row.op in registry.names():
            key = json.dumps([row.op, row.problem], sort_keys=True)
            if key not in found or row.ms < (found[key].ms or 0):
                found[key] = row
    return found


def _line(row: Row) -> str:
    """Return a row as a line of JSON, with the peers that do the op's own work."""
    assert row.ms is not None
    ratios: Mapping[str, float] = row.vs_peer or {}
    peers = {name: _rounded(ratio * row.ms) for name, ratio in ratios.items() if name != "copy"}
    return json.dumps(
        {
            "op": row.op,
            "problem": row.problem,
            "kernel": row.kernel,
            "ms": _rounded(row.ms),
            "peers": peers,
        }
    )


def _rounded(ms: float) -> float:
    return float(_DIGITS.format(ms))


def main() -> int:
    """Write the file where it would change."""
    return renewed(FILE, lambda: text_of(RESULTS))


if __name__ == "__main__":
    sys.exit(main())
