"""A search: configs are tried one after another, and the best few compared once more in the end."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Protocol

import numpy as np

from jetfire.core import interrupts, lookup
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, WrongResultError
from jetfire.core.files import Unwritable, add, append
from jetfire.core.kernel import Config, Kernel
from jetfire.core.lookup import Found
from jetfire.measure.plan import Case
from jetfire.measure.timer import Timing
from jetfire.report import counters
from jetfire.tuner.space import Space
from jetfire.tuner.strategies import Exhausted
from jetfire.tuner.study import StorageError, Study
from jetfire.tuner.trial import Comparison, Measurement, Objective, RunnerError

# Extra seconds for a search in which no config was tried yet, so that at least one is.
GRACE_S = 4.0
ROUNDS = 15  # of a comparison
LEAST_AHEAD = 4
Progress = Callable[[Config, Measurement], None]


class TrialRunner(Protocol):
    """Measures configs of one problem at a time."""

    capacity: int
    """Configs worth having under way at once."""

    def submit(self, number: int, config: Config) -> None:
        """Begin to measure a config, as trial `number`."""

    def wait(self, timeout: float) -> list[tuple[int, Measurement]]:
        """Return what has ended, after so many seconds at most; at least one where there is any."""

    def cancel(self) -> None:
        """Give up all that is under way."""

    def compare(
        self, configs: Sequence[Config], budget_s: float, rounds: int, peers: bool
    ) -> Comparison:
        """Measure again, all in turn, with the peers or without: the final word.

        Raises:
            RunnerError: it came to no end.
        """

    def now(self) -> float:
        """Return seconds since some fixed time."""

    def close(self) -> None:
        """Let go of processes and devices."""


@dataclass(frozen=True)
class Limits:
    """When a search ends.

    Attributes:
        trials: of the study, those of earlier runs and of other tuners counted in.
        deadline: on the runner's clock.
    """

    trials: int
    deadline: float


def search(study: Study, runner: TrialRunner, limits: Limits, progress: Progress) -> None:
    """Try configs until either limit, or until there are none left.

    Whatever ends it, no trial is left under way: those without an outcome may be tried again.

    Raises:
        StorageError: the study cannot be written.
    """
    under_way: dict[int, Config] = {}
    # A strategy that has heard of too few of its configs chooses blindly.
    ahead = min(runner.capacity, max(LEAST_AHEAD, limits.trials // 5))
    exhausted, tried = False, bool(study.finished())
    try:
        while runner.now() < (end := limits.deadline + (0.0 if tried else GRACE_S)):
            while not exhausted and len(under_way) < ahead and study.taken() < limits.trials:
                try:
                    number, config = study.ask()
                except Exhausted:
                    exhausted = True
                    break
                under_way[number] = config
                runner.submit(number, config)
            if not under_way:
                return
            for number, measurement in runner.wait(end - runner.now()):
                tried = True
                config = under_way.pop(number)
                study.finish(number, config, measurement)
                _log(study.log, number, config, measurement)
                progress(config, measurement)
    finally:
        with interrupts.deferred():
            runner.cancel()
            study.give_up()


def _log(file: Path, number: int, config: Config, measurement: Measurement) -> None:
    """Log failures with all that is known of them."""
    if measurement.measured:
        return
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    text = (
        f"{time} trial {number}: {measurement.outcome}\n{config.as_dict()}\n"
        f"{measurement.message}\n\n"
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with append(file) as log:
            add(log, text.encode(errors="replace"))
    except OSError as error:
        raise StorageError(f"cannot write log {file}: {error.strerror or error}") from None
    except Unwritable as error:
        raise StorageError(f"cannot write log {error}") from None


# The final comparison.

# A gain below half a percent is not worth a change, however sure.
LEAST_GAIN = 0.005


@dataclass(frozen=True)
class Final:
    """What the final comparison decided.

    Attributes:
        config, timing: the winner's.
        default: the default config's timing; None where the default fails.
        before: the timing of the config in use before: the profile's, the nearest's or the default.
        kept: no finalist beat what had to be beaten.
        peers: name → timing.
        failed: config → why it was left out.
        digest: the SHA-256 of the winner's outputs, where it is known.
        left_out: the peers that were not timed, each with the reason.
    """

    config: Config
    timing: Timing
    default: Timing | None
    before: Timing | None
    kept: bool
    peers: Mapping[str, Timing]
    failed: Mapping[Config, str]
    digest: str | None = None
    left_out: Sequence[str] = ()

    @classmethod
    def chosen(
        cls, config: Config, compared: Comparison, default: Config, before: Config, kept: bool
    ) -> Final:
        """Return the decision for one of the configs that were compared."""
        timings = compared.configs
        return cls(
            config,
            timings[config],
            timings.get(default),
            timings.get(before),
            kept,
            compared.peers,
            compared.failed,
            compared.digests.get(config),
            compared.left_out,
        )

    @property
    def vs_peer(self) -> dict[str, float]:
        """Peer time over the winner's: above 1 is faster."""
        return {name: timing.ms / self.timing.ms for name, timing in self.peers.items()}

    @property
    def gain(self) -> float | None:
        """The default's time over the winner's."""
        return None if self.default is None else self.default.ms / self.timing.ms

    def as_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "ms": self.timing.ms,
            "ms_p20": self.timing.ms_p20,
            "ms_p80": self.timing.ms_p80,
            "joules": self.timing.joules,
            "default_ms": None if self.default is None else self.default.ms,
            "before_ms": None if self.before is None else self.before.ms,
            "gain": self.gain,
            "kept": self.kept,
            "vs_peer": self.vs_peer,
        }


@dataclass(frozen=True)
class SearchTarget:
    """One kernel at one problem, and what it may be tuned over."""

    case: Case
    kernel: Kernel
    space: Space

    def __str__(self) -> str:
        return f"{self.case.op.name}/{self.kernel.name} {self.case.problem}"

    def found(self, device: Device) -> Found:
        """Return what a lookup gives now."""
        return lookup.find(self.case.op, self.kernel, self.case.problem, device)


@dataclass(frozen=True)
class FinishedSearch:
    """A search that has come to its end.

    Attributes:
        found: what a lookup gave before.
        trials: of the study, all that have an outcome.
        saved: the profile was written; else the one that was there stays.
    """

    target: SearchTarget
    found: Found
    final: Final
    trials: Sequence[tuple[Config, Measurement]]
    saved: bool


@dataclass(frozen=True)
class CountedSearch:
    """The counters of a search's winner.

    Attributes:
        default: those of the default config; the same where it is the winner, None where it fails.
    """

    target: SearchTarget
    winner: Mapping[str, Any]
    default: Mapping[str, Any] | None

    @property
    def said(self) -> str:
        """Return a sentence: how the winner differs from the default, else what limits it."""
        return counters.verdict(self.winner, self.default)


def costs(timing: Timing, objective: Objective) -> np.ndarray:
    """Return what the objective minimises, per sample: ms, joules, or the product of both.

    Energy has a sample for each run in which power was read.
    """
    if objective == "time":
        return np.array(timing.values)
    joules = np.array(timing.energies)
    return joules if objective == "energy" else joules * timing.ms


def beats(challenger: Timing, incumbent: Timing, objective: Objective) -> bool:
    """Return whether the challenger's gain exceeds the noise, and `LEAST_GAIN`.

    Rounds are paired, since drift hits both alike: the 95% confidence interval of the median ratio,
    which is one of its order statistics, must lie below 1. So must the ratio of the medians, which
    is the gain that a profile names.
    """
    a, b = costs(challenger, objective), costs(incumbent, objective)
    count = min(len(a), len(b))
    if count == 0:  # of one of them no power could be read
        return False
    ratios = np.sort(a[:count] / b[:count])
    upper = min(count, math.ceil(0.5 * count + 0.98 * math.sqrt(count))) - 1
    gains = np.median(ratios) < 1 - LEAST_GAIN and ratios[upper] < 1
    return bool(gains and np.median(a) < np.median(b))


def decide(
    runner: TrialRunner,
    finalists: Sequence[Config],
    default: Config,
    before: Config,
    tuned: bool,
    objective: Objective,
    budget_s: float,
    broken: Mapping[Config, str] | None = None,
    rounds: int = ROUNDS,
) -> Final:
    """Compare the finalists with the incumbent and take the best if it beats that.

    Args:
        before: the config in use until now.
        tuned: it is this problem's own, and so the incumbent; else the default is.
        broken: configs that are known to fail, and why: they are not run again.

    Raises:
        WrongResultError: neither the default nor any finalist is right.
    """
    incumbent = before if tuned else default
    configs = list(dict.fromkeys([incumbent, default, before, *finalists]))
    compared = compare(runner, configs, budget_s, rounds, broken)
    timings = compared.configs
    middles = {
        c: np.median(found) if len(found := costs(t, objective)) else math.inf
        for c, t in timings.items()
    }
    ranked = sorted(timings, key=lambda config: middles[config])
    held = timings.get(incumbent)
    better = [c for c in ranked if held is None or beats(timings[c], held, objective)]
    winner = next(iter(better), incumbent)
    return Final.chosen(winner, compared, default, before, not better)


def compare(
    runner: TrialRunner,
    configs: Sequence[Config],
    budget_s: float,
    rounds: int,
    broken: Mapping[Config, str] | None = None,
) -> Comparison:
    """Check and time configs in turn, with the peers.

    Args:
        broken: configs that are known to fail, and why: they are not run again.

    Raises:
        WrongResultError: none is right.
    """
    known = {config: broken[config] for config in configs if broken and config in broken}
    sound = [config for config in configs if config not in known]
    found = _compare(runner, sound, budget_s, rounds, known)
    if not found.configs:
        reason, _, rest = next(iter(found.failed.values())).strip().partition("\n")
        error = WrongResultError(f"no config is right: {reason}")
        error.details = rest  # a compiler's
        raise error
    return found


def best_for_all(times: Sequence[Mapping[Config, float]], how: str) -> tuple[Config, list[float]]:
    """Return the config that is best for several problems, and its ratio to each one's best.

    Args:
        times: of each problem, config → what is to be small.
        how: what of the ratios is to be least: their geometric `mean`, or the `worst` of them.

    Raises:
        WrongResultError: none is right for all of them.
    """
    ratios = {
        config: [one[config] / min(one.values()) for one in times]
        for config in times[0]
        if all(config in one for one in times)
    }
    if not ratios:
        raise WrongResultError(f"no config is right for all {len(times)} problems")
    score: Callable[[list[float]], float] = max if how == "worst" else geometric_mean
    best = min(ratios, key=lambda config: score(ratios[config]))
    return best, ratios[best]


def _compare(
    runner: TrialRunner,
    configs: Sequence[Config],
    budget_s: float,
    rounds: int,
    failed: Mapping[Config, str],
) -> Comparison:
    """Compare configs and peers in one worker.

    A comparison that brings its worker down is repeated without the peers, one of which may be to
    blame, and then without those configs that bring it down alone.

    Args:
        failed: config → why, of those that have failed already.
    """
    if not configs:
        return Comparison({}, {}, failed)
    left_out: list[str] = []
    for peers in (True, False):
        try:
            found = runner.compare(configs, budget_s, rounds, peers)
            left_out += found.left_out
            return replace(found, failed={**failed, **found.failed}, left_out=left_out)
        except RunnerError as error:
            trouble = str(error)
            left_out = [f"all peers: the comparison failed beside them: {trouble}"]
    culprits: dict[Config, str] = {}
    for config in configs if len(configs) > 1 else ():
        try:
            culprits.update(runner.compare([config], 0.0, rounds, False).failed)
        except RunnerError as error:
            culprits[config] = str(error)
    if not culprits and len(configs) > 1:
        raise JetfireError(f"the finalists run alone but not in turn: {trouble}")
    culprits = culprits or dict.fromkeys(configs, trouble)
    sound = [config for config in configs if config not in culprits]
    return _compare(runner, sound, budget_s, rounds, {**failed, **culprits})
