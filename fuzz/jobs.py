"""Batches of many pairs of op and kernel, one after another here or in several processes."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from jetfire import ops
from jetfire.fuzz.sanitize import Tool
from jetfire.fuzz.search import BATCH, Report, run_batch, run_huge
from jetfire.fuzz.worker import CASE_S, Isolated, load
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireError
from jetfire.ops.op import Kernel, Op
from jetfire.tuner import interrupts
from jetfire.tuner.process import Worker

Pair = tuple[str, str]
END_S = 3.0  # for jobs to end by themselves, with their workers
ALONE = -1  # the number of a batch of one huge example, alone on its device


@dataclass(frozen=True)
class Plan:
    """What to fuzz, and how.

    Attributes:
        pairs: of op and kernel.
        devices: of one model; job i runs on the i-th, over and over.
        examples: of each pair, at most.
        deadline: of `time.monotonic`, after which no case is begun.
        against: the kernel of each op that outputs are compared with.
        loaded: files with kernels of their own.
        case_s: seconds that a case may take.
        sanitizer: the tool that workers run under.
        device: as it was asked for.
    """

    pairs: Sequence[Pair]
    devices: Sequence[Device]
    examples: int
    seed: int
    largest: int
    jobs: int = 1
    deadline: float = math.inf
    against: str | None = None
    loaded: Sequence[Path] = ()
    case_s: float = CASE_S
    sanitizer: Tool | None = None
    device: str = "auto"

    def executor(self, device: Device) -> Isolated:
        return Isolated(device, self.loaded, self.case_s, self.sanitizer)

    def units(self) -> Iterator[tuple[Pair, int]]:
        """Batches, those of the same number of all pairs together; huge ones come last."""
        for number in range(-(-self.examples // BATCH)):
            for pair in self.pairs:
                yield pair, number
        if self.devices[0].kind == "cuda" and self.sanitizer is None and self.against is None:
            for pair in self.pairs:
                yield pair, ALONE

    def run(self, unit: tuple[Pair, int], device: Device, executor: Isolated) -> Report:
        (name, kernel), number = unit
        op = ops.get(name)
        if number == ALONE:
            return self._run_huge(op, ops.get_kernel(name, kernel), device, executor)
        other = None if self.against is None else ops.get_kernel(name, self.against)
        wanted = min(BATCH, self.examples - number * BATCH)
        return run_batch(
            op, ops.get_kernel(name, kernel), device, number, wanted, self.seed, self.largest,
            executor, other, self.deadline,
        )  # fmt: skip

    def _run_huge(self, op: Op, kernel: Kernel, device: Device, executor: Isolated) -> Report:
        """One example, once no other job of this user's has such a one on the device."""
        folder = platformdirs.user_cache_path("jetfire", ensure_exists=True)
        lock = FileLock(folder / f"fuzz-{device.index}.lock")
        try:
            held = lock.acquire(timeout=max(0.0, self.deadline - time.monotonic()))
        except Timeout:
            return Report(op.name, kernel.name)
        with held:
            return run_huge(op, kernel, device, self.seed, executor, self.deadline)


@dataclass
class Results:
    """Reports so far, by pair."""

    plan: Plan
    pairs: dict[Pair, Report] = field(default_factory=dict)
    closed: set[Pair] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pairs |= {pair: Report(*pair) for pair in self.plan.pairs}

    def add(self, report: Report) -> Report:
        """A batch's, without the failure of a pair that has one already, from another job."""
        whole = self.pairs[report.op, report.kernel]
        if whole.failures:
            report.failures.clear()
        whole.merge(report)
        if whole.failures or not whole.examples:
            self.closed.add((report.op, report.kernel))  # one is enough; or nothing is legal here
        return report

    def wanted(self, unit: tuple[Pair, int]) -> bool:
        return unit[0] not in self.closed and time.monotonic() < self.plan.deadline


def run(plan: Plan, results: Results) -> Iterator[Report]:
    """Run all that a plan asks for, a batch's report at a time; the results have them too."""
    return _run_here(plan, results) if plan.jobs == 1 else _run_in_jobs(plan, results)


def _run_here(plan: Plan, results: Results) -> Iterator[Report]:
    device = plan.devices[0]
    with contextlib.closing(plan.executor(device)) as executor:
        for unit in filter(results.wanted, plan.units()):
            yield results.add(plan.run(unit, device, executor))


def _run_in_jobs(plan: Plan, results: Results) -> Iterator[Report]:
    units = plan.units()
    idle: list[Worker] = []
    busy: dict[Any, Worker] = {}
    folder = tempfile.TemporaryDirectory(prefix="jetfire-fuzz-", ignore_cleanup_errors=True)
    try:
        for i in range(plan.jobs):
            device = plan.devices[i % len(plan.devices)]
            with interrupts.deferred():
                idle.append(Worker(drive, plan, device, folder.name, parent=True))
        while True:
            while idle and (unit := next(filter(results.wanted, units), None)):
                job = idle.pop()
                job.ask(unit)
                busy[job.connection] = job
            if not busy:
                return
            for ready in mp_connection.wait(list(busy)):
                job = busy.pop(ready)
                idle.append(job)
                yield results.add(_answer(job))
    finally:
        end = time.monotonic() + END_S
        jobs = [*idle, *busy.values()]
        for job in jobs:
            job.connection.close()
        for job in jobs:
            job.close(max(0.0, end - time.monotonic()))
        folder.cleanup()


def _answer(job: Worker) -> Report:
    try:
        answer: Any = job.answer()
    except EOFError:
        raise JetfireError(f"a job ended: {job.last_words()}") from None
    if isinstance(answer, _Error):
        raise answer.error from _Elsewhere(answer.told)
    report: Report = answer
    return report


@dataclass(frozen=True)
class _Error:
    """What ended a job's batch, and the traceback there, which does not travel with it."""

    error: JetfireError
    told: str


class _Elsewhere(Exception):
    """The traceback of an error of a job: the cause of the same error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def drive(connection: Connection, plan: Plan, device: Device, folder: str) -> None:
    """Answers a unit of the plan with its report, or with an error.

    Args:
        folder: of temporary files, which whoever started it removes.
    """
    tempfile.tempdir = folder
    with contextlib.closing(plan.executor(device)) as executor:
        for file in plan.loaded:
            load(file)
        while True:
            (unit,) = connection.recv()
            try:
                connection.send(plan.run(unit, device, executor))
            except JetfireError as error:
                connection.send(_Error(error, traceback.format_exc()))
            except Exception as error:
                said = JetfireError(f"internal error: {type(error).__name__}: {error}")
                connection.send(_Error(said, traceback.format_exc()))
