"""The final comparison: the best few, the incumbent and the default, timed in turn once more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jetfire.core.errors import JetfireError, WrongResultError
from jetfire.core.kernel import Config
from jetfire.measure.timer import Timing
from jetfire.tuner.runner import ROUNDS, Comparison, RunnerError, TrialRunner
from jetfire.tuner.trial import Objective

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
        failed: config's label → why it was left out.
    """

    config: Config
    timing: Timing
    default: Timing | None
    before: Timing | None
    kept: bool
    peers: dict[str, Timing]
    failed: dict[str, str]

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
            "incumbent_ms": None if self.before is None else self.before.ms,
            "gain": self.gain,
            "kept": self.kept,
            "vs_peer": self.vs_peer,
        }


def costs(timing: Timing, objective: Objective) -> np.ndarray:
    """What is to be small, of each sample: milliseconds, joules, or the product of both.

    Energy has a sample for each run in which power was read.
    """
    if objective == "time":
        return np.array(timing.values)
    joules = np.array(timing.energies)
    return joules if objective == "energy" else joules * timing.ms


def beats(challenger: Timing, incumbent: Timing, objective: Objective) -> bool:
    """The challenger's gain exceeds the noise, and `LEAST_GAIN`.

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


def _middle(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.inf


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
    known = {str(i): broken[c] for i, c in enumerate(configs) if broken and c in broken}
    sound = {str(i): c for i, c in enumerate(configs) if str(i) not in known}
    comparison = _compare(runner, sound, budget_s, rounds, known)
    timings = {configs[int(label)]: timing for label, timing in comparison.configs.items()}
    if not timings:
        reason, _, rest = next(iter(comparison.failed.values())).strip().partition("\n")
        error = WrongResultError(f"no config is right: {reason}")
        error.details = rest  # a compiler's
        raise error
    ranked = sorted(timings, key=lambda config: _middle(costs(timings[config], objective)))
    held = timings.get(incumbent)
    better = [c for c in ranked if held is None or beats(timings[c], held, objective)]
    kept, winner = not better, next(iter(better), incumbent)
    return Final(
        winner,
        timings[winner],
        timings.get(default),
        timings.get(before),
        kept,
        dict(comparison.peers),
        {str(configs[int(label)].as_dict()): reason for label, reason in comparison.failed.items()},
    )


def _compare(
    runner: TrialRunner,
    configs: Mapping[str, Config],
    budget_s: float,
    rounds: int,
    failed: Mapping[str, str],
) -> Comparison:
    """A comparison that brings its worker down is repeated without the peers, one of which may be
    to blame, and then without those configs that bring it down alone.

    Args:
        failed: label → why, of those that have failed already.
    """
    if not configs:
        return Comparison({}, {}, failed)
    for peers in (True, False):
        try:
            found = runner.compare(configs, budget_s, rounds, peers)
            return replace(found, failed={**failed, **found.failed})
        except RunnerError as error:
            trouble = str(error)
    culprits: dict[str, str] = {}
    for label, config in configs.items() if len(configs) > 1 else ():
        try:
            culprits.update(runner.compare({label: config}, 0.0, rounds, False).failed)
        except RunnerError as error:
            culprits[label] = str(error)
    if not culprits and len(configs) > 1:
        raise JetfireError(f"the finalists run alone but not in turn: {trouble}")
    culprits = culprits or dict.fromkeys(configs, trouble)
    sound = {label: config for label, config in configs.items() if label not in culprits}
    return _compare(runner, sound, budget_s, rounds, {**failed, **culprits})
