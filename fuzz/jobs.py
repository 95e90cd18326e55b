"""Batches of many pairs of op and kernel, one after another here or in several processes."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

from filelock import FileLock, Timeout

from jetfire.core import files, interrupts, registry
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, UsageError, refused
from jetfire.core.processes import Worker
from jetfire.fuzz.draw import FuzzExtent, FuzzTarget
from jetfire.fuzz.sanitize import Tool
from jetfire.fuzz.search import PairReport, run_batch, run_huge
from jetfire.fuzz.worker import CASE_S, Isolated

Pair = tuple[str, str]
END_S = 3.0  # for jobs to end by themselves, with their workers
ALONE = -1  # the number of a batch of one huge example, alone on its device
HUGE_ROUND = 8  # the round before which huge examples come, or after the last


@dataclass(frozen=True)
class Unit:
    """A batch of a pair: its number, how many examples it has, and what is known by then.

    Attributes:
        deadline: of `time.monotonic`, after which it begins none.
        known: examples of the pair that have failed, by how.
    """

    pair: Pair
    number: int
    examples: int = 1
    deadline: float = math.inf
    known: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FuzzPlan:
    """What to fuzz, and how.

    Attributes:
        extents: how much of each pair of op and kernel.
        devices: of one model; job i runs on the i-th, over and over.
        deadline: of `time.monotonic`, after which no case is begun; but for the time that making
            failures small takes, by which it is later.
        against: the kernel of each op that outputs are compared with.
        case_s: seconds that a case may take.
        sanitizer: the tool that workers run under.
        device: as it was asked for.
    """

    extents: Mapping[Pair, FuzzExtent]
    devices: Sequence[Device]
    seed: int
    jobs: int = 1
    deadline: float = math.inf
    against: str | None = None
    case_s: float = CASE_S
    sanitizer: Tool | None = None
    device: str = "auto"

    def executor(self, device: Device) -> Isolated:
        return Isolated(device, self.case_s, self.sanitizer)

    def rounds(self) -> Iterator[list[Unit]]:
        """Yield rounds, each the next batch of every pair that has one left.

        One round more is of a huge example per pair.
        """
        left = {pair: extent.batches() for pair, extent in self.extents.items()}
        for turn in itertools.count():
            found = {pair: next(batches, None) for pair, batches in left.items()}
            units = [Unit(pair, *batch) for pair, batch in found.items() if batch is not None]
            if turn == HUGE_ROUND or (turn < HUGE_ROUND and not units):
                # A huge one of each pair, on a GPU and where nothing slows a case.
                plain = self.sanitizer is None and self.against is None
                on_gpu = self.devices[0].kind == "cuda"
                yield [Unit(pair, ALONE) for pair in self.extents if plain and on_gpu]
            if not units:
                return
            yield units

    def run(self, unit: Unit, device: Device, executor: Isolated) -> Iterator[PairReport]:
        """Run a unit, and yield what came of it in parts."""
        name, kernel = unit.pair
        target = FuzzTarget(
            registry.get(name),
            registry.get_kernel(name, kernel),
            device,
            self.extents[unit.pair],
            None if self.against is None else registry.get_kernel(name, self.against),
        )
        if unit.number == ALONE:
            yield self._run_huge(target, executor, unit.deadline)
            return
        yield from run_batch(
            target, unit.number, unit.examples, self.seed, executor, unit.deadline, unit.known
        )

    def _run_huge(self, target: FuzzTarget, executor: Isolated, deadline: float) -> PairReport:
        """Run one example, once no other job of this user's has such a one on the device."""
        folder = files.cache()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"fuzz-{target.device.index}.lock")
        try:
            held = lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        except Timeout:
            return PairReport(target.op.name, target.kernel.name)
        with held:
            return run_huge(target, self.seed, executor, deadline)


@dataclass
class FuzzResults:
    """Reports so far, by pair, and what is still to be run.

    Attributes:
        out_of_time: the deadline ended it.
        finished: nothing is still to be run, or time ended it: neither Ctrl-C nor an error did.
    """

    plan: FuzzPlan
    pairs: dict[Pair, PairReport] = field(default_factory=dict)
    out_of_time: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.pairs |= {pair: PairReport(*pair) for pair in self.plan.extents}

    @property
    def deadline(self) -> float:
        shrinking_s = sum(report.shrinking_s for report in self.pairs.values())
        return self.plan.deadline + shrinking_s / self.plan.jobs

    def add(self, report: PairReport) -> PairReport:
        """Add a part of a batch and return it, with those of its failures alone that are new."""
        report.failures[:] = self.pairs[report.op, report.kernel].merge(report)
        return report

    def units(self) -> Iterator[Unit]:
        """Yield what is to be run next: each has an equal share of the time that is left."""
        for units in self.plan.rounds():
            for i, unit in enumerate(units):
                left = self.deadline - time.monotonic()
                if left <= 0:
                    self.out_of_time = True
                    return
                report = self.pairs[unit.pair]
                if not report.ended:
                    share = left * min(1.0, self.plan.jobs / (len(units) - i))
                    end = time.monotonic() + share
                    yield replace(unit, deadline=end, known=dict(report.failing))
            if all(report.ended for report in self.pairs.values()):
                return

    def short(self) -> list[Pair]:
        """Pairs that time has left without the examples that were asked for, or without any."""
        return [
            pair
            for pair, report in self.pairs.items()
            if (report.cut or self.out_of_time)
            and not report.ended
            and report.examples < (self.plan.extents[pair].examples or 1)
        ]


def run(plan: FuzzPlan, results: FuzzResults) -> Iterator[PairReport]:
    """Run all that a plan asks for, and yield parts of batches; the results have them too."""
    if plan.jobs > 1:
        yield from _run_in_jobs(plan, results)
    else:
        device = plan.devices[0]
        with contextlib.closing(plan.executor(device)) as executor:
            for unit in results.units():
                for part in plan.run(unit, device, executor):
                    yield results.add(part)
    results.finished = True


def _run_in_jobs(plan: FuzzPlan, results: FuzzResults) -> Iterator[PairReport]:
    units = results.units()
    idle: list[Worker] = []
    busy: dict[Any, Worker] = {}
    folder = tempfile.TemporaryDirectory(prefix="jetfire-fuzz-", ignore_cleanup_errors=True)
    try:
        while True:
            while (idle or len(busy) < plan.jobs) and (unit := next(units, None)):
                if not idle:  # no process is started that would have nothing to do
                    device = plan.devices[len(busy) % len(plan.devices)]
                    with interrupts.deferred():
                        idle.append(Worker(drive, plan, device, folder.name, parent=True))
                job = idle.pop()
                job.ask(unit)
                busy[job.connection] = job
            if not busy:
                return
            for ready in mp_connection.wait(list(busy)):
                part = _answer(busy[ready])
                if part is None:
                    idle.append(busy.pop(ready))
                else:
                    yield results.add(part)
    finally:
        end = time.monotonic() + END_S
        jobs = [*idle, *busy.values()]
        for job in jobs:
            job.connection.close()
        for job in jobs:
            job.close(max(0.0, end - time.monotonic()))
        folder.cleanup()


def _answer(job: Worker) -> PairReport | None:
    """Return a part of the job's unit, or None after the last one."""
    try:
        part, error, told = job.answer()
    except EOFError:
        raise JetfireError(f"a job ended: {job.last_words()}") from None
    if error is not None:
        raise error from _Elsewhere(told)
    return part


class _Elsewhere(Exception):
    """The traceback of an error of a job: the cause of the same error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def drive(connection: Connection, plan: FuzzPlan, device: Device, folder: str) -> None:
    """Answer a unit of the plan with its parts and then None, or with an error.

    An answer is the part, and of an error that and the traceback here, which does not travel in it.

    Args:
        folder: of temporary files, which whoever started it removes.
    """
    tempfile.tempdir = folder
    with contextlib.closing(plan.executor(device)) as executor:
        while True:
            (unit,) = connection.recv()
            try:
                for part in plan.run(unit, device, executor):
                    connection.send((part, None, ""))
                connection.send((None, None, ""))
            except Exception as error:
                said: Exception = error
                if isinstance(error, OSError):  # no disk, no rights: the user's to mend
                    said = UsageError(refused(error))
                elif not isinstance(error, JetfireError):
                    said = JetfireError(f"internal error: {type(error).__name__}: {error}")
                connection.send((None, said, traceback.format_exc()))
