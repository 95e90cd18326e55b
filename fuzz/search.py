"""Batches of examples for a pair of op and kernel, and how a failure is made small."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.fuzz.draw import Batch, FuzzTarget, sizes_of, usual
from jetfire.fuzz.example import Example, Failure, Outcome, traits
from jetfire.fuzz.simplify import simplify
from jetfire.fuzz.worker import Executor, InProcess

HUGE_TRIES = 4  # at a problem that fits
SHRINK_S = 30.0  # to make one failing case smaller
# One fault hides no other and does not take all the time: of examples that fail alike so many are
# made small, and a kernel has its further ones until so many failures differ once they are small,
# or so many examples have ended the worker.
ALIKE, FAILURES, ENDED = 2, 4, 3
# Of reports that are merged.
SUMMED = ("examples", "failing", "seconds", "shrinking_s", "coverage", "differing", "compared")
JOINED = ("configs", "variants", "cut", "broken")
PART_S = 2.0  # of a batch, after which it hands over what came of its examples by then


@dataclass
class PairReport:
    """What became of a pair of op and kernel.

    Attributes:
        examples: cases run, but for those that shrinking ran.
        failing: those of them that failed, by how.
        seconds: that all took; shrinking_s: that making failures small did.
        configs: the different ones; variants: those of config and flags.
        coverage: examples by what they are a case of.
        differing, compared: elements of comparisons with another kernel or config.
        cut: a batch ended before its examples, for time; broken: as there was no worker for more.
        failures: those that differ, once they are small; most: after so many there is no example.
    """

    op: str
    kernel: str
    most: int = FAILURES
    examples: int = 0
    failing: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    shrinking_s: float = 0.0
    configs: set[str] = field(default_factory=set)
    variants: set[str] = field(default_factory=set)
    coverage: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    compared: int = 0
    cut: bool = False
    broken: bool = False
    failures: list[Failure] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether so much is wrong that it has no further examples."""
        lost = sum(count for how, count in self.failing.items() if how in ("crash", "timeout"))
        return len(self.failures) >= self.most or lost >= ENDED or self.broken

    def add(self, case: Example, outcome: Outcome) -> None:
        self.examples += 1
        if outcome.failed:
            self.failing[_how(outcome)] += 1
        config = str(sorted(case.config.items()))
        sizes = sizes_of(registry.get(case.op))
        flags = sorted((k, str(v)) for k, v in case.problem.items() if k not in sizes)
        self.configs.add(config)
        self.variants.add(f"{config} {flags}")
        self.coverage.update(traits(case, outcome))
        self.differing += outcome.differing
        self.compared += outcome.compared

    def add_failure(self, failure: Failure) -> bool:
        """Add a failure, and return whether there was none of the same kind and small problem."""
        new = all(_likeness(failure) != _likeness(other) for other in self.failures)
        if new and len(self.failures) < self.most:
            self.failures.append(failure)
            return True
        return False

    def merge(self, other: PairReport) -> list[Failure]:
        """Add another report, and return the failures that are new."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in JOINED:
            setattr(self, name, getattr(self, name) | getattr(other, name))
        return [failure for failure in other.failures if self.add_failure(failure)]


def _how(outcome: Outcome) -> str:
    """The kind of a failure, and the output or exception that its message begins with."""
    what, colon, _ = outcome.message.partition(":")
    told = colon and outcome.kind not in ("crash", "timeout") and what.isidentifier()
    return f"{outcome.kind} {what}" if told else str(outcome.kind)


def _likeness(failure: Failure) -> tuple[str, str]:
    return failure.kind, str(sorted(failure.case.problem.items(), key=str))


class _Shrinking:
    """Runs what is simpler than a failing case; the simplest that fails alike is its failure.

    A case has one answer, whatever the kernel does when it is run again.
    """

    def __init__(self, executor: Executor, failure: Failure) -> None:
        self.failure = failure
        self._executor = executor
        self._deadline = time.monotonic() + SHRINK_S
        self._known: dict[str, bool] = {}

    def fails(self, case: Example) -> bool:
        key = case.as_json()
        if key not in self._known:
            if time.monotonic() > self._deadline:
                return False
            try:
                outcome = self._executor.run(case)
            except Exception:  # of the executor, not of the case: what is small by now stays so
                self._deadline = -math.inf
                outcome = Outcome()
            self._known[key] = outcome.kind == self.failure.kind
            if self._known[key]:
                case, message = outcome.case or case, outcome.message
                self.failure = replace(self.failure, case=case, message=message)
        return self._known[key]


class _Search:
    """Runs a batch's cases, and makes those that fail small.

    Attributes:
        report: what came of the examples of all parts.
        part: what is still to be handed over: all that came of those since the part before.

    Args:
        known: examples of other batches that failed, by how.
    """

    def __init__(
        self, target: FuzzTarget, executor: Executor, known: Mapping[str, int], most: int = FAILURES
    ) -> None:
        self._new = partial(PairReport, target.op.name, target.kernel.name, most)
        self.report, self.part = self._new(), self._new()
        self._device, self._executor, self._known = target.device, executor, known
        self._began = time.monotonic()

    def try_case(self, case: Example) -> Outcome:
        outcome = self._executor.run(case)
        for report in (self.report, self.part):
            report.add(case, outcome)
        how = _how(outcome)
        if outcome.failed and self._known.get(how, 0) + self.report.failing[how] <= ALIKE:
            self._found(outcome.case or case, outcome)
        return outcome

    def _found(self, case: Example, outcome: Outcome) -> None:
        assert outcome.kind is not None
        assert outcome.kind != "skipped"
        began = time.monotonic()
        shrinking = _Shrinking(self._executor, Failure(case, outcome.message, outcome.kind))
        simplify(case, self._device, shrinking.fails)
        if self.report.add_failure(shrinking.failure):
            self.part.failures.append(shrinking.failure)
        self.part.shrinking_s += time.monotonic() - began

    def due(self) -> bool:
        """Return whether a part has an example, and has taken `PART_S`."""
        return self.part.examples > 0 and time.monotonic() - self._began >= PART_S

    def hand_over(self) -> PairReport:
        """Return the part, and begin another."""
        part, self.part = self.part, self._new()
        now = time.monotonic()
        part.seconds, self._began = now - self._began, now
        return part

    def done(self) -> PairReport:
        """Return the last part, with what the executor found out last."""
        if not self.report.failures and (late := self._executor.late()) is not None:
            assert late.case is not None
            self._found(late.case, late)
        return self.hand_over()


def run_batch(
    target: FuzzTarget,
    number: int,
    examples: int,
    seed: int,
    executor: Executor,
    deadline: float = math.inf,
    known: Mapping[str, int] | None = None,
    most: int = FAILURES,
) -> Iterator[PairReport]:
    """Run the examples of one batch, the same for the same seed and number.

    Yield what came of them in parts, which add up to the batch: it may be long, and cut off.

    Args:
        known: examples of other batches that failed, as a PairReport has them: those that fail
            alike need not all be made small.
        most: failures, after which there are no further examples.
        deadline: of `time.monotonic`, after which no example is begun.

    Raises:
        Exception: the executor's, where no failure was found before it.
    """
    rng = random.Random(f"{seed}:{target.op.name}:{target.kernel.name}:{number}")
    search = _Search(target, executor, known or {}, most)
    try:
        for case in Batch(target, number, rng).cases(examples):
            search.part.cut = time.monotonic() >= deadline
            if search.part.cut or search.report.ended:
                break
            if search.due():
                yield search.hand_over()
            search.try_case(case)
    except Exception:
        if not search.report.failures:
            raise
        search.part.broken = True
    yield search.done()


def run_huge(
    target: FuzzTarget, seed: int, executor: Executor, deadline: float = math.inf
) -> PairReport:
    """Run one example beyond 2^31 elements: of a few that are drawn the first that fits."""
    rng = random.Random(f"{seed}:{target.op.name}:{target.kernel.name}:huge")
    batch, search = Batch(target, 0, rng), _Search(target, executor, {})
    for _ in range(HUGE_TRIES):
        case = batch.huge()
        if case is None or time.monotonic() >= deadline or search.try_case(case).checked:
            break
    return search.done()


def fuzz_kernel(
    op: Op,
    kernel: Kernel,
    device: Device,
    *,
    examples: int | None = None,
    seed: int = 0,
    largest: int | None = None,
    executor: Executor | None = None,
    deadline: float = math.inf,
    against: Kernel | None = None,
    failures: int = FAILURES,
) -> PairReport:
    """Fuzz one kernel of an op until it has had its examples, or has failed too often.

    Args:
        failures: that differ, after which there are no further examples.
        examples, largest: a FuzzExtent's; by default as many and as large as `draw.usual` has them.
        executor: where cases run; by default here.
        deadline: of `time.monotonic`, after which no case is begun.
        against: a kernel whose outputs are compared with this one's.
    """
    report = PairReport(op.name, kernel.name, failures)
    extent = usual(op, kernel, device)
    if extent is None:
        return report
    extent = extent.given(examples, largest)
    target = FuzzTarget(op, kernel, device, extent, against)
    executor = executor or InProcess(device)
    for number, wanted in extent.batches():
        if report.ended or time.monotonic() >= deadline:
            break
        before, known = report.examples, dict(report.failing)
        for part in run_batch(target, number, wanted, seed, executor, deadline, known, failures):
            report.merge(part)
        if report.examples == before:
            break
    return report
