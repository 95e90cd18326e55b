"""`jetfire export`: one tuned kernel to a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jetfire.bench.plan import Case
from jetfire.export import default_target, export, targets
from jetfire.export.check import runs_here
from jetfire.export.plan import make

if TYPE_CHECKING:
    from jetfire.bench.results import Row

# An export at less of the workbench's own speed is warned of.
LEAST_SPEED = 0.98


@dataclass(frozen=True)
class Asked:
    """What was asked for; None where it was not."""

    cases: Sequence[Case]
    kernel: str | None
    target: str | None
    capability: tuple[int, int]
    folder: Path
    name: str | None = None
    check: bool = True


def run(asked: Asked) -> None:
    """Export, and print the files.

    Raises:
        UsageError, NoDeviceError, WrongResultError: see `plan.make` and `export`.
    """
    if asked.target is not None:
        targets.get(asked.target)
    plan = make(asked.cases, asked.kernel, asked.capability, asked.name)
    target = asked.target or default_target(plan)
    rows = export(plan, target, asked.folder, check=asked.check)
    for file in sorted(path for path in asked.folder.rglob("*") if path.is_file()):
        print(file)
    done = "written, not built"
    if asked.check:
        done = "built; self-test passed" if runs_here(plan) else (
            f"built; not run: no GPU of sm_{plan.capability[0]}{plan.capability[1]} here"
        )  # fmt: skip
    _note(f"{plan.op.name}/{plan.kernel.name} as {target}: {done}")
    for row in rows:
        _note(_speed(row))


def _speed(row: Row) -> str:
    """How fast it is, and whether that is too slow."""
    from jetfire.bench import show

    ratio = (row.vs_peer or {})["launch"]
    sizes = show.shape_text(row.problem, ())
    text = f"{sizes}: {show.time_text(row.ms)}, {ratio:.3f}× the speed of the workbench's launch"
    return text if ratio >= LEAST_SPEED else f"warning: {text}: expected {LEAST_SPEED} at least"


def _note(text: str) -> None:
    print(f"jetfire: {text}", file=sys.stderr)
