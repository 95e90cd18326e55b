"""Peaks of the devices whose results are committed: `peaks.json`, which the package holds.

docs/results/ is not shipped. `python -m jetfire.bench.shipped_peaks`, which `make report` runs,
writes the file anew from what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from jetfire.core import schema
from jetfire.core.errors import JetfireError, UsageError
from jetfire.core.files import write
from jetfire.core.schema import Line, Name
from jetfire.measure.results import Peaks, Results

SCHEMA = 1
FILE = Path(__file__).parent.parent / "measure" / "peaks.json"
RESULTS = Path(__file__).parent.parent / "docs" / "results"


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
class _File:
    devices: Annotated[list[ShippedPeaks], Field(max_length=1000)]


@cache
def every() -> dict[str, ShippedPeaks]:
    """Return the shipped peaks by device.

    Raises:
        Unreadable: the package's file is damaged.
    """
    return {one.name: one for one in schema.load(FILE, _File, version=SCHEMA).devices}


def result_files(folder: Path) -> list[Path]:
    """Return the results files of a folder, those of short names first.

    Beside them are records of lookups (``…-lookups.json``) and of studies (``study-….json``).
    """
    found = sorted(folder.glob("*.json"), key=lambda path: (len(path.name), path.name))
    others = ("study-*", "*-lookups.json")
    return [file for file in found if not any(map(file.match, others))]


def text_of(folder: Path) -> str:
    """Return what `FILE` holds where a folder has these results; of one device the shortest name.

    Raises:
        UsageError: none of them has peaks, or one cannot be read.
    """
    found: dict[str, dict[str, object]] = {}
    for file in result_files(folder):
        device = Results.load(file).device
        if device.get("name") and device.get("peaks"):
            one = {"name": device["name"], "source": file.name, "peaks": device["peaks"]}
            found.setdefault(device["name"], one)
    if not found:
        raise UsageError(f"{folder}: expected results with peaks")
    return json.dumps({"schema": SCHEMA, "devices": list(found.values())}, indent=1) + "\n"


def main() -> int:
    """Write the file where it would change."""
    return renewed(FILE, lambda: text_of(RESULTS))


def renewed(file: Path, text_of_results: Callable[[], str]) -> int:
    """Write a file where it would change, say so, and return an exit code."""
    try:
        text = text_of_results()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write(file, text)
            print(f"{file}: written")
    except JetfireError as error:
        print(f"jetfire: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
