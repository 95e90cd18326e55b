"""The searches of one command: their devices, their time, and what each is worth in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna.storages import InMemoryStorage

from jetfire.bench import command as bench_command
from jetfire.core import profiles
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, TimedOutError, UsageError, WrongResultError
from jetfire.core.files import check_writable
from jetfire.core.kernel import Kernel
from jetfire.core.profiles import Entry, Found
from jetfire.measure import peaks, provenance
from jetfire.measure.nvml import Nvml
from jetfire.measure.plan import Case
from jetfire.tuner import summary
from jetfire.tuner.device import DeviceRunner
from jetfire.tuner.display import SearchDisplay
from jetfire.tuner.final import Final, decide
from jetfire.tuner.measure import Job
from jetfire.tuner.options import EFFORTS, TuneOptions
from jetfire.tuner.runner import RunnerError
from jetfire.tuner.search import Limits, search
from jetfire.tuner.space import Point, Space
from jetfire.tuner.strategies import strategy_of
from jetfire.tuner.study import Identity, StorageError, Study
from jetfire.tuner.trial import Measurement, Objective, digits

NEAREST = 3  # configs of neighbouring problems' profiles that are tried first
# Seconds that the final comparison takes at first guess, and that a search gets at least: of many
# searches and little time the first are done well, and the others left.
FINAL_S, LEAST_S = 3.0, 2.0
# Outcomes that another run would not change; a crash may have come from outside.
HOPELESS = ("wrong", "illegal", "compile")


@dataclass(frozen=True)
class SearchTarget:
    """One kernel at one problem, and what it may be tuned over."""

    case: Case
    kernel: Kernel
    space: Space

    def __str__(self) -> str:
        return f"{self.case.op.name}/{self.kernel.name} {self.case.problem}"


@dataclass(frozen=True)
class FinishedSearch:
    """A search that has come to its end.

    Attributes:
        found: what a lookup gave before.
        saved: the profile that was written; None where it stays as it was.
    """

    target: SearchTarget
    found: Found
    final: Final
    study: Study
    saved: Path | None

    @property
    def outcome(self) -> summary.SearchOutcome:
        """It as the summary shows it."""
        target = self.target
        return summary.SearchOutcome(
            target.kernel,
            target.case.problem,
            target.space.base,
            self.final,
            self.study.finished(),
            self.saved is not None,
        )


class Session:
    """The devices, the display and the limits that all the searches of one command share."""

    def __init__(
        self,
        asked: TuneOptions,
        objective: Objective,
        devices: Sequence[Device],
        display: SearchDisplay,
    ) -> None:
        self.asked, self.objective = asked, objective
        self.device, self.display = devices[0], display
        self.effort = EFFORTS[asked.effort]
        self.trials = asked.trials or self.effort.trials
        self.runner = DeviceRunner(devices, asked.trial_s)
        self.studies: list[tuple[SearchTarget, Study]] = []
        self.untried = 0  # searches that there was no time for
        self._started = False
        self.end = self.runner.now() + asked.budget_s
        self.final_s = FINAL_S
        nvml = Nvml.open(self.device.torch_device)
        self.driver = nvml.driver() if nvml else None
        if objective != "time" and (nvml is None or nvml.joules() is None):
            raise UsageError(
                f"--objective {asked.objective}: {self.device.label} has no energy counter to read"
            )
        self.peaks = peaks.cached(self.device, self.driver)

    def study(self, target: SearchTarget, first: Sequence[Point]) -> Study:
        """The target's study, described for whoever reads it."""
        asked, problem = self.asked, target.case.problem
        name = asked.strategy
        if name == "tpe" and target.space.whole and len(target.space.pool) <= self.trials:
            name = "exhaustive"
        identity = Identity(
            target.kernel, problem, self.device, target.space, self.objective, asked.data
        )
        record = bench_command.device_record(self.device, dict(self.peaks), self.driver)
        attributes = {
            "op": target.case.op.name,
            "kernel": target.kernel.name,
            "problem": problem.as_dict(),
            "device": record,
            "default": target.space.base.as_dict(),
            "objective": self.objective,
            "strategy": name,
            "seed": asked.seed,
            "space": {field: list(v) for field, v in target.space.fields.items()},
            "source": target.kernel.source_hash(),
            "peaks": dict(self.peaks),
            "flops": target.case.op.flops(problem),
            "bytes": target.case.op.bytes(problem),
        }
        strategy = strategy_of(name, target.space, asked.seed, first)
        storage = asked.storage if asked.keep else InMemoryStorage()
        return Study(identity, strategy, storage, self.display.note, attributes)

    def tune(self, target: SearchTarget, searches_left: int) -> FinishedSearch | None:
        """Search one target with its share of the time left, decide, save.

        Returns:
            None where an earlier run has done it all, or there was no time for a single config.

        Raises:
            KeyboardInterrupt: after the best so far has been saved.
        """
        found = self._found(target)
        study = self.study(target, self._first(target, found))
        self.studies.append((target, study))
        if self._done(study, is_current(found, self.objective)):
            return None
        self._start()
        share = max(LEAST_S, (self.end - self.runner.now()) / searches_left - self.final_s)
        share = min(share, max(0.0, self.end - self.runner.now() - self.final_s))
        stopped = self._search(target, study, share)
        if not study.finished():
            if stopped is not None:
                raise stopped
            self.display.note(f"{target}: no config was tried in {share:.0f} s: nothing is saved")
            self.untried += 1
            return None
        try:
            tuned, stopped = self._finished(target, study, found, stopped)
        except (WrongResultError, TimedOutError):
            if stopped is not None:
                raise stopped from None
            raise
        if stopped is not None:
            raise Stopped(tuned) from stopped
        return tuned

    def _found(self, target: SearchTarget) -> Found:
        return profiles.find(target.kernel, target.case.problem, self.device)

    def _search(self, target: SearchTarget, study: Study, share: float) -> BaseException | None:
        """Search for so many seconds; what stopped it before, if anything did."""
        asked = self.asked
        self.display.begin(str(target), self.trials, share, study.finished())
        self.runner.begin(
            Job(
                target.case.op,
                target.kernel,
                target.case.problem,
                asked.seed,
                asked.data,
                self.objective != "time",
                asked.peers,
            )
        )
        try:
            limits = Limits(self.trials, self.runner.now() + share)
            search(study, self.runner, limits, self.display.trial)
        except RunnerError as error:
            text = f"its inputs or expected results cannot be made: {error}"
            if "memory" in str(error).lower():
                raise UsageError(f"{target}: {text}: expected smaller sizes") from None
            raise JetfireError(text) from None
        except (KeyboardInterrupt, StorageError) as error:
            self.display.note(f"{str(error) or 'interrupted'}: keeping the best so far")
            return error
        failed = sum(not measurement.measured for _, measurement in study.finished())
        if failed:
            self.display.note(f"{target}: {failed} trials failed: {study.log} says how")
        return None

    def _finished(
        self, target: SearchTarget, study: Study, found: Found, stopped: BaseException | None
    ) -> tuple[FinishedSearch, BaseException | None]:
        """Decide and save; Ctrl-C hastens it."""
        if self.asked.keep:  # another tuner may have written a profile in the meantime
            profiles.forget()
            found = self._found(target)
        try:
            return self._finish(target, study, found, self.effort.rounds_s), stopped
        except KeyboardInterrupt as error:
            return self._finish(target, study, found, 1.0), error

    def _start(self) -> None:
        """Start the workers, which takes seconds, once something is sure to need them."""
        if not self._started:
            if self.asked.keep:
                _check_folder(profiles.path(profiles.user_folder(), self.device, "any"))
            self.runner.start()
            self._started = True

    def _first(self, target: SearchTarget, found: Found) -> list[Point]:
        """The default, the profile's config, and those of the nearest problems."""
        near = profiles.nearest(target.kernel, target.case.problem, self.device, NEAREST)
        configs = [target.space.base.as_dict(), found.config.as_dict(), *(e.config for e in near)]
        points = [target.space.point(config) for config in configs]
        return [p for p in dict.fromkeys(points) if p is not None and target.space.legal(p)]

    def _done(self, study: Study, fresh: bool) -> bool:
        tried = len(study.finished())
        enough = tried >= self.trials or study.exhausted()
        if not (fresh and "final" in study.optuna.user_attrs and enough):
            return False
        self.display.index += 1
        self.display.note(
            f"{study.identity.name}: tuned already, {tried} trials: "
            + ("all that are legal" if study.exhausted() else "a higher --trials goes on")
        )
        return True

    def _finish(
        self, target: SearchTarget, study: Study, found: Found, rounds_s: float
    ) -> FinishedSearch:
        begin, tuned = self.runner.now(), found.source == "tuned"
        rounds_s = min(rounds_s, max(1.0, self.end - begin))
        hopeless = {config: m.message for config, m in study.finished() if self._hopeless(m)}
        try:
            final = decide(
                self.runner,
                study.best(self.effort.finalists),
                target.space.base,
                found.config,
                tuned,
                self.objective,
                rounds_s,
                hopeless,
                self.effort.rounds,
            )
        except WrongResultError:
            if {m.outcome for _, m in study.finished()} == {"timeout"}:
                raise TimedOutError(
                    f"{target}: no config was done in {self.asked.trial_s:g} s: give a longer "
                    "--trial-timeout"
                ) from None
            raise
        self.final_s = self.runner.now() - begin
        for config, reason in final.failed.items():
            self.display.note(f"{target}: left out of the final comparison: {config}: {reason}")
        saved = None
        if self.asked.keep and not (final.kept and is_current(found, self.objective)):
            saved = self._save(target, study, final)
        study.conclude(final.as_dict())
        return FinishedSearch(target, found, final, study, saved)

    def _hopeless(self, measurement: Measurement) -> bool:
        """Whether another run would change nothing; with more time it may."""
        if measurement.outcome == "timeout":
            return self.asked.trial_s < 2 * measurement.seconds
        return measurement.outcome in HOPELESS

    def _save(self, target: SearchTarget, study: Study, final: Final) -> Path:
        timing = final.timing
        entry = Entry(
            kernel=target.kernel.name,
            problem=target.case.problem.as_dict(),
            config=final.config.as_dict(),
            ms=digits(timing.ms),
            ms_p20=digits(timing.ms_p20),
            ms_p80=digits(timing.ms_p80),
            samples=timing.samples,
            default_ms=None if final.default is None else digits(final.default.ms),
            joules=None if timing.joules is None else digits(timing.joules),
            objective=self.objective,
            vs_peer={name: digits(ratio) for name, ratio in final.vs_peer.items()},
            trials=len(study.finished()),
            strategy=str(study.optuna.user_attrs["strategy"]),
            provenance=provenance.of(target.kernel, self.device, self.driver),
        )
        return profiles.save(profiles.user_folder(), self.device, target.case.op.name, [entry])


def is_current(found: Found, objective: str) -> bool:
    """A profile for just this problem, objective and kernel source."""
    if found.entry is None or found.source != "tuned" or found.stale:
        return False
    return found.entry.objective == objective


def _check_folder(file: Path) -> None:
    """Fail before the search rather than after it.

    Raises:
        UsageError: profiles cannot be written there.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write profile {file}: {error.strerror}") from None
    check_writable(file)


class Stopped(Exception):
    """A search that was cut short, and what it found."""

    def __init__(self, tuned: FinishedSearch) -> None:
        super().__init__()
        self.tuned = tuned
