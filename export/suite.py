"""`jetfire bench --suite export`: exports that are built, tested, and timed beside the workbench.

Each op says which of its kernels, to which targets (`Op.exported`). All are built and pass their
self-tests first, several at a time; then each is timed while nothing else runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetfire.bench import command
from jetfire.bench.progress import watch
from jetfire.core import registry, terminal
from jetfire.core.device import Device, target_device
from jetfire.core.errors import JetfireError, NoDeviceError, UsageError
from jetfire.core.terminal import note
from jetfire.export import measure, targets
from jetfire.export.folder import contents, write
from jetfire.export.plan import ExportPlan, make
from jetfire.export.target import resume, stop
from jetfire.measure.plan import Case
from jetfire.measure.results import Row
from jetfire.report.text import plural

SM90 = target_device((9, 0))
AT_ONCE = 8


@dataclass(frozen=True)
class Export:
    """One export of a suite."""

    op: str
    kernel: str
    problem: Any
    target: str

    def __str__(self) -> str:
        return f"{self.op}/{self.kernel} {self.problem} as {self.target}"

    def plan(self) -> ExportPlan:
        """Return its plan; raise UsageError where there is no profile."""
        return make([Case(registry.get(self.op), self.problem)], self.kernel, SM90, None)


def exports() -> list[Export]:
    """Return what ops say (`Op.exported`), each to every target that it names."""
    ops = [registry.get(name) for name in registry.names()]
    found = [(exported, op) for op in ops for exported in op.exported()]
    return [
        Export(op.name, exported.kernel, op.Problem.parse(exported.problem), target)
        for exported, op in sorted(found, key=lambda pair: pair[0].turn)
        for target in exported.targets or targets.NAMES
    ]


def prepare(export: Export, folder: Path) -> ExportPlan:
    """Write, build and test an export in a new folder.

    Raises:
        JetfireError: it cannot be.
    """
    plan, target = export.plan(), targets.get(export.target)
    write(folder, contents(plan, export.target))
    target.build(plan, folder)
    target.selftest(plan, folder)
    return plan


@contextmanager
def prepared(wanted: Sequence[Export]) -> Iterator[dict[Export, tuple[Future[ExportPlan], Path]]]:
    """Yield each with what `prepare` comes to, and its folder, which goes away at the end."""
    jobs = min(AT_ONCE, os.cpu_count() or 1)
    try:
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
            found = {}
            for i, export in enumerate(wanted):
                folder = Path(scratch) / f"{i}-{export.op}-{export.target}"
                found[export] = pool.submit(prepare, export, folder), folder
            try:
                yield found
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                stop()
                raise
    finally:
        resume()


def rows(
    export: Export, done: Future[ExportPlan], folder: Path, peaks: Mapping[str, Any] | None
) -> list[Row]:
    """Return its row, or one that is not ok: whatever is wrong, others are measured."""
    try:
        return measure.measure(done.result(), export.target, folder, peaks)
    except Exception as error:
        what = str(error) if isinstance(error, JetfireError) else f"{type(error).__name__}: {error}"
        return [replace(_no_row(export), error=" ".join(what.split())[:500])]


def _no_row(export: Export) -> Row:
    """Return the row of an export without times, with its config where there is one."""
    try:
        plan = export.plan()
    except JetfireError:
        return Row(
            export.op,
            export.kernel,
            "kernel",
            export.problem.as_dict(),
            data="normal",
            ok=False,
            export=export.target,
        )
    return measure.row_of(plan, plan.tuned[0], export.target)


def suite(asked: command.BenchOptions) -> None:
    """Measure, show and save a suite of exports.

    Raises:
        JetfireError: with the exit code of what went wrong; NoDeviceError without a Hopper GPU.
    """
    if asked.plot is not None:
        raise UsageError(f"--plot {asked.plot}: exports have no chart: expected -o FILE")
    existing = command.existing_rows(asked)
    device, wanted = Device.parse(asked.device), exports()
    if asked.dry_run:
        terminal.planned([str(one) for one in wanted])
        return
    if device.capability != SM90.capability:
        raise NoDeviceError(
            "--suite export: its kernels are for a GPU of sm_90, this is "
            f"{device.label}; jetfire-export writes and builds them"
        )
    output = command.Output(asked, device, existing, "jetfire bench --suite export")
    note(f"building {plural(len(wanted), 'export')}")
    with prepared(wanted) as found:
        for done, _ in found.values():
            done.exception()  # waits: nothing else is to run while one is timed
        with output.kept():
            for export in watch(wanted):
                output.add(rows(export, *found[export], output.peaks))
