"""`jetfire export`: one tuned kernel to a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetfire.bench.plan import Case
from jetfire.export import default_target, export, targets
from jetfire.export.check import runs_here
from jetfire.export.plan import make


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
    folder = export(plan, target, asked.folder, check=asked.check)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(file)
    done = "written, not built"
    if asked.check:
        done = "built; self-test passed" if runs_here(plan) else (
            f"built; not run: no GPU of sm_{plan.capability[0]}{plan.capability[1]} here"
        )  # fmt: skip
    print(f"jetfire: {plan.op.name}/{plan.kernel.name} as {target}: {done}", file=sys.stderr)
