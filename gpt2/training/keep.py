"""Runs' logs made small enough to commit: `python -m jetfire.gpt2.training.keep RUN... -o FOLDER`.

Each becomes FOLDER/<run>.jsonl.gz, a log as any other: seven digits of a number, of the steps the
first and every N-th, all other lines, and no path of the machine it ran on. The header's `kept`
says so, and how many runs the GPU had at once: times of more than one are no step's. The same log
gives the same bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetfire.core import files
from jetfire.core.errors import JetfireError
from jetfire.gpt2.training import log
from jetfire.gpt2.training.curves import name_of

DIGITS = 7  # losses are shown with five, and twice rounded would be off


def kept(records: Sequence[log.Record], every: int, at_once: int = 1) -> list[log.Record]:
    """Return the lines of a log that are kept, numbers rounded and paths cut."""
    head, *rest = [_neutral(record) for record in records]
    head = {**head, "kept": {"every": every, "digits": DIGITS, "runs_at_once": at_once}}
    return [
        head,
        *(r for r in rest if r["kind"] != "step" or r["step"] % every == 0 or r["step"] == 1),
    ]


def _neutral(value: Any) -> Any:
    """Return a value with `DIGITS` digits of each number, and the last part of a path."""
    if isinstance(value, dict):
        return {key: _neutral(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_neutral(entry) for entry in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def write(run: Path, folder: Path, every: int, at_once: int) -> Path:
    """The file that was written.

    Raises:
        UsageError: the run has no log that can be read, or the file cannot be written.
    """
    lines = "".join(json.dumps(record) + "\n" for record in kept(log.read(run), every, at_once))
    file = folder / f"{name_of(run)}.jsonl.gz"
    files.write(file, gzip.compress(lines.encode(), 9, mtime=0), folders=True)
    return file


def main(arguments: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m jetfire.gpt2.training.keep", description=__doc__
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--runs-at-once", type=int, default=1, metavar="N", help="on the GPU")
    given = parser.parse_args(arguments)
    for option, value in (("every", given.every), ("runs-at-once", given.runs_at_once)):
        if value < 1:
            parser.error(f"--{option} {value}: expected at least 1")
    try:
        for run in given.runs:
            print(write(run, given.output, given.every, given.runs_at_once))
    except JetfireError as error:
        print(f"jetfire: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
