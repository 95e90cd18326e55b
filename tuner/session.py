"""The searches of one command: their devices, their time, and what each is worth in the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np
from optuna.storages import InMemoryStorage

from jetfire.core import lookup, profiles
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, TimedOutError, UsageError, WrongResultError
from jetfire.core.files import check_writable
from jetfire.core.kernel import Config
from jetfire.core.lookup import Found
from jetfire.core.profiles import Entry
from jetfire.measure import peaks, provenance
from jetfire.measure.load import Load
from jetfire.measure.ncu import Ncu, ProfilingError
from jetfire.measure.timer import noise
from jetfire.report.text import plural
from jetfire.tuner.device import DeviceRunner
from jetfire.tuner.display import SearchDisplay
from jetfire.tuner.options import EFFORTS, TuneOptions
from jetfire.tuner.search import (
    CountedSearch,
    Final,
    FinishedSearch,
    Limits,
    SearchTarget,
    best_for_all,
    compare,
    costs,
    decide,
    search,
)
from jetfire.tuner.space import Point
from jetfire.tuner.strategies import STRATEGIES
from jetfire.tuner.study import Identity, StorageError, Study
from jetfire.tuner.trial import Measurement, RunnerError, digits
from jetfire.tuner.worker import Job

NEAREST = 3  # configs of neighbouring problems' profiles that are tried first
# Seconds: a first guess at what a final comparison takes, and the least that a search gets. Where
# time is too short for all searches, the first are done well and the others are not begun.
FINAL_S, LEAST_S = 3.0, 2.0
# Outcomes that another run would not change; a crash may have come from outside.
LASTING = ("wrong", "illegal", "compile")


@dataclass
class Search:
    """The search of one target.

    Attributes:
        found: what a lookup gives.
        trials: those of the study that have an outcome.
    """

    target: SearchTarget
    study: Study
    found: Found
    trials: list[tuple[Config, Measurement]]


class Session:
    """The devices, the display and the limits that all the searches of one command share.

    Attributes:
        runner: measures configs; it is closed once the searches are done.
        work: all that is to be searched.
        searches: those that were begun, or done by an earlier run.
        tuned: the searches that came to their ends; failed: the errors of others.
        counted: of each search whose winner was profiled, its counters.
        untried: searches that there was no time for.
        stopped: what ended the session before its work, if anything did.
    """

    def __init__(
        self,
        asked: TuneOptions,
        device: Device,
        runner: DeviceRunner,
        work: Sequence[SearchTarget],
        display: SearchDisplay,
    ) -> None:
        self.asked, self.objective, self.work = asked, asked.objective, work
        self.device, self.display = device, display
        self.effort = EFFORTS[asked.effort]
        self.trials = asked.trials or self.effort.trials
        self.runner = runner
        self.searches: list[Search] = []
        self.tuned: list[FinishedSearch] = []
        self.failed: list[JetfireError] = []
        self.counted: list[CountedSearch] = []
        self.untried = 0
        self.stopped: BaseException | None = None
        self._started = False
        self.end = self.runner.now() + asked.budget_s
        self.final_s = FINAL_S
        load = Load(self.device)
        monitor = load.monitor
        if self.objective != "time" and (monitor is None or monitor.joules() is None):
            raise UsageError(
                f"--objective {self.objective}: {self.device.label} has no energy counter to read"
            )
        self.driver, self.peaks = load.driver, peaks.cached(load)

    def run(self, profiler: Ncu | None) -> None:
        """Tune each target in turn while there is time; what fails is named.

        Args:
            profiler: counts each winner and its default afterwards, those of earlier runs too.
        """
        try:
            with closing(self.runner):
                self._tune_each()
                if self.asked.for_all and self.stopped is None:
                    self._finish_together()
            if profiler is not None and self.stopped is None:
                for one in self.searches:
                    try:
                        self._count(one, profiler)
                    except JetfireError as error:
                        self.failed.append(error)
        except KeyboardInterrupt as error:
            self.stopped = error

    def _tune_each(self) -> None:
        count = len(self.work)
        for i, target in enumerate(self.work):
            left = count - i
            if self.runner.now() + self.final_s >= self.end:
                self.untried += left
                self.display.note(
                    f"the budget is spent: {left} of "
                    f"{plural(count, 'search', 'searches')} left; the same command goes on"
                )
                return
            try:
                self.stopped = self._tune(target, left)
            except JetfireError as error:
                if count > 1:
                    self.display.note(f"{target}: {error}")
                self.failed.append(error)
            if self.stopped is not None:
                return

    def _tune(self, target: SearchTarget, searches_left: int) -> BaseException | None:
        """Search one target with its share of the time left, decide, save.

        Nothing is done where an earlier run has done it all. What is to be for all targets is
        decided later (`_finish_together`).

        Returns:
            What cut the search short, once the best so far has been saved; None if nothing did.
        """
        one = self._opened(target)
        self.searches.append(one)
        if not self.asked.for_all and self._done(one):
            return None
        if not self._started:  # it takes seconds: once something is sure to need the workers
            if self.asked.keep:
                self._check_folder()
            self.runner.start()
            self._started = True
        share = max(LEAST_S, (self.end - self.runner.now()) / searches_left - self.final_s)
        share = min(share, max(0.0, self.end - self.runner.now() - self.final_s))
        try:
            stopped = self._search(one, share)
        finally:
            one.trials = one.study.finished()
        if not one.trials:
            if stopped is not None:
                raise stopped
            self.display.note(f"{target}: no config was tried in {share:.0f} s: nothing is saved")
            self.untried += 1
            return None
        if self.asked.for_all:
            return stopped
        if self.asked.keep:  # another tuner may have written a profile in the meantime
            profiles.forget()
            one.found = target.found(self.device)
        try:
            try:
                self._finish(one, self.effort.rounds_s)
            except KeyboardInterrupt as error:  # it hastens the end
                stopped = error
                self._finish(one, 1.0)
        except (WrongResultError, TimedOutError):
            if stopped is not None:
                raise stopped from None
            raise
        return stopped

    def _check_folder(self) -> None:
        """Fail before the search rather than after it, where no profile can be written."""
        file = profiles.path(profiles.user_folder(), self.device, "any")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write profile {file}: {error.strerror}") from None
        check_writable(file)

    def _opened(self, target: SearchTarget) -> Search:
        """Return a target's search, whose study is described for whoever reads it.

        First it tries the default, the profile's config, and those of the nearest problems.
        """
        asked, problem, space = self.asked, target.case.problem, target.space
        found = target.found(self.device)
        near = lookup.nearest(target.case.op, target.kernel, problem, self.device, NEAREST)
        configs = [space.base.as_dict(), found.config.as_dict(), *(e.config for e in near)]
        points: dict[Point | None, None] = dict.fromkeys(space.point(config) for config in configs)
        first = [point for point in points if point is not None and space.legal(point)]
        name = asked.strategy
        if name == "tpe" and space.whole and len(space.pool) <= self.trials:
            name = "exhaustive"
        attributes = {
            "op": target.case.op.name,
            "kernel": target.kernel.name,
            "problem": problem.as_dict(),
            "device": provenance.device_record(self.device, self.driver, self.peaks),
            "default": space.base.as_dict(),
            "objective": self.objective,
            "strategy": name,
            "seed": asked.seed,
            "space": {field: list(v) for field, v in space.fields.items()},
            "source": target.kernel.source_hash(),
            "peaks": dict(self.peaks),
            "flops": target.case.op.flops(problem),
            "bytes": target.case.op.bytes(problem),
        }
        study = Study(
            Identity(
                target.kernel,
                problem,
                self.device,
                space,
                self.objective,
                asked.data,
                asked.bits is not None,
            ),
            STRATEGIES[name](space, asked.seed, first, asked.trial_s),
            asked.storage if asked.keep else InMemoryStorage(),
            self.display.note,
            attributes,
        )
        return Search(target, study, found, study.finished())

    def _done(self, one: Search) -> bool:
        """Return whether an earlier run has done it all, and say so."""
        study, tried = one.study, len(one.trials)
        exhausted = study.exhausted()
        decided = is_current(one.found, self.objective) and "final" in study.optuna.user_attrs
        if not decided or not (exhausted or study.taken() >= self.trials):
            return False
        self.display.index += 1
        self.display.note(
            f"{study.identity.name}: tuned already, {plural(tried, 'trial')}: "
            + ("all that are legal" if exhausted else "a higher --trials goes on")
        )
        return True

    def _job(self, one: Search) -> Job:
        asked, case = self.asked, one.target.case
        return Job(
            case.op,
            one.target.kernel,
            case.problem,
            asked.seed,
            asked.data,
            self.objective != "time",
            asked.peers,
            one.found.config if asked.bits else None,
            asked.max_noise,
        )

    def _search(self, one: Search, share: float) -> BaseException | None:
        """Search for so many seconds; what stopped it before, if anything did."""
        target, study = one.target, one.study
        self.display.begin(str(target), self.trials, share, one.trials)
        self.runner.begin(self._job(one))
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
        if failed := sum(not measurement.measured for _, measurement in study.finished()):
            self.display.note(f"{target}: {plural(failed, 'trial')} failed: {study.log} says how")
        return None

    def _finish(self, one: Search, rounds_s: float) -> None:
        """Decide, and save what is new."""
        begin = self.runner.now()
        finalists = one.study.best(self.effort.finalists)
        latest = dict(one.trials)  # what lacked time may have been tried again
        try:
            final = decide(
                self.runner,
                finalists,
                one.target.space.base,
                one.found.config,
                one.found.source == "tuned",
                self.objective,
                min(rounds_s, max(1.0, self.end - begin)),
                {c: m.message for c, m in latest.items() if self._would_fail_again(m)},
                self.effort.rounds,
            )
        except WrongResultError:
            if {m.outcome for _, m in one.trials} == {"timeout"}:
                raise TimedOutError(
                    f"{one.target}: no config was done in {self.asked.trial_s:g} s: give a longer "
                    "--trial-timeout"
                ) from None
            raise
        self.final_s = self.runner.now() - begin
        self._conclude(one, final)

    def _conclude(self, one: Search, final: Final) -> None:
        """Keep what was decided; the profile only where that is new."""
        target = one.target
        for config, reason in final.failed.items():
            left_out = f"left out of the final comparison: {config.as_dict()}: {reason}"
            self.display.note(f"{target}: {left_out}")
        for peer_and_reason in final.left_out:
            self.display.note(f"{target}: left out of the final comparison: {peer_and_reason}")
        most, left = self.asked.max_noise, noise(final.timing.values)
        if most is not None and left > most:
            samples = final.timing.samples
            self.display.note(
                f"{target}: the noise is {left:.1%} still, after {plural(samples, 'sample')}"
            )
        saved = self.asked.keep and not (final.kept and is_current(one.found, self.objective))
        if saved:
            self._save(one, final)
        # First, as the profile is saved: the storage of studies may have failed since.
        self.tuned.append(FinishedSearch(target, one.found, final, one.trials, saved))
        one.study.conclude(final.as_dict())

    def _finish_together(self) -> None:
        """Decide on one config of each kernel for all its problems, and save it for each.

        Every search's best few, its default and the config in use run on every problem.
        """
        searched = [one for one in self.searches if one.trials]
        if missing := len(self.work) - len(searched):
            self.display.note(f"no config for all: {missing} of {len(self.work)} were not searched")
            return
        profiles.forget()  # another tuner may have written some in the meantime
        for one in searched:
            one.found = one.target.found(self.device)
        for kernel in dict.fromkeys(target.kernel for target in self.work):
            alike = [one for one in searched if one.target.kernel is kernel]
            bases = [
                config for one in alike for config in (one.target.space.base, one.found.config)
            ]
            bests = [c for one in alike for c in one.study.best(self.effort.finalists)]
            try:
                finals = self._decided_together(alike, list(dict.fromkeys([*bases, *bests])))
            except JetfireError as error:
                self.display.note(f"{kernel.op}/{kernel.name}: {error}")
                self.failed.append(error)
                continue
            for one, final in zip(alike, finals, strict=True):
                self._conclude(one, final)

    def _decided_together(
        self, searches: Sequence[Search], configs: Sequence[Config]
    ) -> list[Final]:
        """Compare configs on every target, and take the one that is best for all."""
        compared = []
        for one in searches:
            self.runner.begin(self._job(one))
            legal = [c for c in configs if one.target.space.reason(c) is None]
            compared.append(compare(self.runner, legal, self.effort.rounds_s, self.effort.rounds))
        times = [
            {c: float(np.median(costs(t, self.objective))) for c, t in on_one.configs.items()}
            for on_one in compared
        ]
        config, ratios = best_for_all(times, str(self.asked.for_all))
        kernel = searches[0].target.kernel
        self.display.note(
            f"{kernel.op}/{kernel.name}: one config for {len(searches)} problems: "
            f"{geometric_mean(ratios) - 1:.1%} above each problem's best in the geometric mean, "
            f"{max(ratios) - 1:.1%} at worst"
        )
        return [
            Final.chosen(config, on_one, one.target.space.base, one.found.config, False)
            for one, on_one in zip(searches, compared, strict=True)
        ]

    def _count(self, one: Search, profiler: Ncu) -> None:
        """Count a search's winner and its default, where there is a winner."""
        final = one.study.optuna.user_attrs.get("final")
        if not final:
            return
        target = one.target
        seed, data, case = self.asked.seed, self.asked.data, target.case
        winner, default = dict(final.get("config") or {}), target.space.base.as_dict()
        found = {}
        for config in (winner, default) if winner != default else (winner,):
            name = "winner" if config is winner else "default"
            if name == "default" and final.get("default_ms") is None:
                continue  # it fails
            try:
                found[name] = profiler.count(case, target.kernel.name, config, seed, data)
            except ProfilingError as error:
                self.display.note(f"{target}: the {name} is not profiled: {error}")
        if "winner" in found:
            default_too = found["winner"] if winner == default else found.get("default")
            self.counted.append(CountedSearch(target, found["winner"], default_too))
            counters = {"counters": found["winner"], "default_counters": default_too}
            one.study.conclude({**final, **counters})

    def _would_fail_again(self, measurement: Measurement) -> bool:
        """Return whether another run would change nothing; with more time it may."""
        if measurement.outcome == "timeout":
            return not measurement.lacked_time(self.asked.trial_s)
        return measurement.outcome in LASTING

    def _save(self, one: Search, final: Final) -> None:
        target, timing = one.target, final.timing
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
            trials=len(one.trials),
            strategy=str(one.study.optuna.user_attrs["strategy"]),
            provenance=provenance.of(target.kernel, self.device),
            digest=final.digest,
        )
        profiles.save(profiles.user_folder(), self.device, target.case.op, [entry])


def is_current(found: Found, objective: str) -> bool:
    """Return whether a profile is for just this problem, objective and kernel source."""
    if found.entry is None or found.source != "tuned" or found.stale:
        return False
    return found.entry.objective == objective
