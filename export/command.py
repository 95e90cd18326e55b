"""`jetfire export`: one tuned kernel to a folder."""

from __future__ import annotations

from jetfire.core import broken, terminal
from jetfire.core.errors import RegressionError
from jetfire.core.terminal import note
from jetfire.export.folder import default_target, export
from jetfire.export.options import ExportOptions
from jetfire.export.plan import make
from jetfire.measure.results import Row, shape_text
from jetfire.report.text import time_text, times

# An export at less of the workbench's own speed is a regression.
LEAST_SPEED = 0.98


def run(asked: ExportOptions) -> None:
    """Export, and print the files.

    Raises:
        UsageError, NoDeviceError, WrongResultError: see `plan.make` and `export`.
        RegressionError: it is slower than the workbench's own launch; it is there nonetheless.
    """
    plan = make(asked.cases, asked.kernel, asked.device, asked.name)
    target = asked.target or default_target(plan)
    with broken.compiling(plan.op.name, plan.kernel.name, "sm_{}{}".format(*plan.capability)):
        rows = export(plan, target, asked.folder, check=asked.check)
    written = sorted(path for path in asked.folder.rglob("*") if path.is_file())
    found = {"files": written, "rows": [row.as_dict() for row in rows]}
    terminal.result(found, lambda: print(*written, sep="\n"))
    done = "written, not built"
    if asked.check:
        architecture = f"sm_{plan.capability[0]}{plan.capability[1]}"
        not_run = f"built; not run: no GPU of {architecture} here"
        done = "built; self-test passed" if plan.runs_here else not_run
    note(f"{plan.op.name}/{plan.kernel.name} as {target}: {done}")
    if not all(tuned.own for tuned in plan.tuned):
        note(
            "the tuned config is two launches at once, which no export has: it was exported in one "
            "launch, which takes longer"
        )
    for row in rows:
        note(_speed(row))
    slow = [f"{_sizes(row)} {_ratio(row):.3f}×" for row in rows if _ratio(row) < LEAST_SPEED]
    if slow:
        raise RegressionError(
            f"{', '.join(slow)}: expected {LEAST_SPEED} of the speed of the workbench's launch at "
            "least"
        )


def _ratio(row: Row) -> float:
    return (row.vs_peer or {})["launch"]


def _sizes(row: Row) -> str:
    return shape_text(row.problem, ())


def _speed(row: Row) -> str:
    speed = times(_ratio(row), 3)
    return f"{_sizes(row)}: {time_text(row.ms)}, {speed} the speed of the workbench's launch"
