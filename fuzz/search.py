"""Batches of examples for a pair of op and kernel, and how a failure is made small."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from jetfire import ops
from jetfire.fuzz import draw
from jetfire.fuzz.case import Case, Failure, Outcome
from jetfire.fuzz.coverage import traits
from jetfire.fuzz.simplify import simplify
from jetfire.fuzz.worker import Executor, InProcess
from jetfire.ops.device import Device
from jetfire.ops.op import Kernel, Op

BATCH = 25
SPARE = BATCH // 2  # Hypothesis counts a case that it draws twice as two
HUGE_TRIES = 4  # at a problem that fits
SHRINK_S = 60.0  # to make one failing case smaller


@dataclass
class Report:
    """What became of a pair of op and kernel.

    Attributes:
        examples: cases run, but for those that shrinking ran.
        configs: the different ones; variants: those of config and flags.
        coverage: examples by what they are a case of.
        differing, compared: elements of comparisons with another kernel or config.
    """

    op: str
    kernel: str
    examples: int = 0
    seconds: float = 0.0
    configs: set[str] = field(default_factory=set)
    variants: set[str] = field(default_factory=set)
    coverage: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    compared: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.examples += 1
        config = str(sorted(case.config.items()))
        sizes = draw.sizes_of(ops.get(case.op))
        flags = sorted((k, str(v)) for k, v in case.problem.items() if k not in sizes)
        self.configs.add(config)
        self.variants.add(f"{config} {flags}")
        self.coverage.update(traits(case, outcome))
        self.differing += outcome.differing
        self.compared += outcome.compared

    def merge(self, other: Report) -> None:
        self.examples += other.examples
        self.seconds += other.seconds
        self.configs |= other.configs
        self.variants |= other.variants
        self.coverage.update(other.coverage)
        self.differing += other.differing
        self.compared += other.compared
        self.failures += other.failures


class _Wrong(AssertionError):
    """What Hypothesis shrinks."""


class _Search:
    """Runs a batch's cases, and once one has failed only what fails alike.

    Hypothesis may run a case again: the answer is then what it was, whatever the kernel does.
    """

    def __init__(self, executor: Executor, report: Report, examples: int, deadline: float) -> None:
        self._executor, self._report, self._examples = executor, report, examples
        self._deadline = deadline
        self._known: dict[str, Outcome] = {}
        self._error: Exception | None = None
        self.failure: Failure | None = None

    def try_case(self, case: Case) -> bool:
        """Whether it is right, or was not run; a wrong one is kept.

        An error of the executor, which Hypothesis would shrink, is the last of what is run.
        """
        key = case.as_json()
        if key not in self._known:
            enough = self.failure is None and self._report.examples >= self._examples
            if enough or self._error is not None or time.monotonic() > self._deadline:
                return True
            try:
                self._known[key] = outcome = self._executor.run(case)
            except Exception as error:
                self._error = error
                return True
            if self.failure is None:
                self._report.add(case, outcome)
        outcome = self._known[key]
        if not outcome.failed or (self.failure and outcome.kind != self.failure.kind):
            return True
        if self.failure is None:
            self._deadline = time.monotonic() + SHRINK_S
        self._fail(case, outcome)
        return False

    def _fail(self, case: Case, outcome: Outcome) -> None:
        assert outcome.kind is not None
        assert outcome.kind != "skipped"
        self.failure = Failure(outcome.case or case, outcome.message, outcome.kind)

    def still_fails(self, case: Case) -> bool:
        return not self.try_case(case)

    def skipped(self, case: Case) -> bool:
        return case.as_json() in self._known and not self._known[case.as_json()].checked

    def done(self, device: Device, began: float) -> Report:
        """The report of what was run, with the failure made small.

        Raises:
            Exception: the executor's, where no failure was found before it.
        """
        if self._error is not None and self.failure is None:
            raise self._error
        if self.failure is None and (late := self._executor.late()) is not None:
            assert late.case is not None
            self._fail(late.case, late)
        if self.failure is not None:
            self._deadline = time.monotonic() + SHRINK_S
            simplify(self.failure.case, device, self.still_fails)
            self._report.failures.append(self.failure)
        self._report.seconds = time.monotonic() - began
        return self._report


def run_batch(
    op: Op, kernel: Kernel, device: Device, number: int, examples: int, seed: int, largest: int,
    executor: Executor, against: Kernel | None = None, deadline: float = math.inf,
) -> Report:  # fmt: skip
    """Examples of one batch, the same for the same seed and number; ends at the first failure."""
    began = time.monotonic()
    rng = random.Random(f"{seed}:{op.name}:{kernel.name}:{number}")
    search = _Search(executor, Report(op.name, kernel.name), examples, deadline)
    pool = draw.variants(op, kernel, device, rng, against)
    if not pool:
        return search.done(device, began)
    empty = draw.empty_case(op, kernel, device, pool, rng)
    if empty is not None and against is None and examples > 1 and not search.try_case(empty):
        return search.done(device, began)

    def one(data: st.DataObject) -> None:
        if not search.try_case(draw.draw_case(data, op, kernel, device, pool, largest)):
            raise _Wrong

    test = settings(
        max_examples=examples + SPARE, deadline=None, database=None, print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )(given(st.data())(one))  # fmt: skip
    with contextlib.suppress(Unsatisfiable, _Wrong):  # the one where nothing drawn was legal
        hypothesis_seed(rng.getrandbits(64))(test)()
    return search.done(device, began)


def run_huge(
    op: Op, kernel: Kernel, device: Device, seed: int, executor: Executor,
    deadline: float = math.inf,
) -> Report:  # fmt: skip
    """One example beyond 2^31 elements, of the few drawn the first that fits in memory."""
    began = time.monotonic()
    rng = random.Random(f"{seed}:{op.name}:{kernel.name}:huge")
    search = _Search(executor, Report(op.name, kernel.name), HUGE_TRIES, deadline)
    pool = draw.variants(op, kernel, device, rng)
    for _ in range(HUGE_TRIES if pool else 0):
        case = draw.huge_case(op, kernel, device, pool, rng)
        if case is None or not search.try_case(case) or not search.skipped(case):
            break
    return search.done(device, began)


def fuzz_kernel(
    op: Op, kernel: Kernel, device: Device, *, examples: int = 1000, seed: int = 0,
    largest: int = 300, executor: Executor | None = None, deadline: float = math.inf,
    against: Kernel | None = None,
) -> Report:  # fmt: skip
    """Fuzz one kernel of an op until it fails, or has been right so often.

    Args:
        examples: at most so many.
        largest: the largest dimension drawn, but for skinny problems.
        executor: where cases run; by default here.
        deadline: of `time.monotonic`, after which no case is begun.
        against: a kernel whose outputs are compared with this one's.
    """
    executor = executor or InProcess(device)
    report = Report(op.name, kernel.name)
    for number in range(math.ceil(examples / BATCH)):
        if report.failures or time.monotonic() > deadline:
            break
        wanted = min(BATCH, examples - number * BATCH)
        batch = run_batch(
            op, kernel, device, number, wanted, seed, largest, executor, against, deadline
        )
        if not batch.examples:
            break
        report.merge(batch)
    return report
