"""The final comparison: the best few, the incumbent and the default, timed in turn once more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jetfire.bench.timer import Timing
from jetfire.ops.errors import JetfireError, WrongResultError
from jetfire.ops.op import Config
from jetfire.tuner.runner import Comparison, Runner, RunnerError
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
    """Each sample's milliseconds, energy, or product of both; up to a constant factor."""
    ms = np.array(timing.values)
    watts = timing.watts if timing.watts is not None else math.nan
    return {"time": ms, "energy": ms * watts, "both": ms * ms * watts}[objective]


def beats(challenger: Timing, incumbent: Timing, objective: Objective) -> bool:
    """The challenger's gain exceeds the noise, and `LEAST_GAIN`.

    Rounds are paired, since drift hits both alike: the 95% confidence interval of the median ratio,
    which is one of its order statistics, must lie below 1.
    """
    a, b = costs(challenger, objective), costs(incumbent, objective)
    count = min(len(a), len(b))
    ratios = np.sort(a[:count] / b[:count])
    upper = min(count, math.ceil(0.5 * count + 0.98 * math.sqrt(count))) - 1
    return bool(np.median(ratios) < 1 - LEAST_GAIN and ratios[upper] < 1)


def decide(
    runner: Runner, finalists: Sequence[Config], default: Config, before: Config, tuned: bool,
    objective: Objective, budget_s: float, broken: Mapping[Config, str] | None = None,
) -> Final:  # fmt: skip
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
    comparison = _compare(
        runner, {str(i): c for i, c in enumerate(configs) if str(i) not in known}, budget_s, known
    )
    timings = {configs[int(label)]: timing for label, timing in comparison.configs.items()}
    if not timings:
        raise WrongResultError(f"no config is right: {next(iter(comparison.failed.values()))}")
    ranked = sorted(timings, key=lambda c: float(np.median(costs(timings[c], objective))))
    held = timings.get(incumbent)
    better = [c for c in ranked if held is None or beats(timings[c], held, objective)]
    kept, winner = not better, next(iter(better), incumbent)
    return Final(
        winner, timings[winner], timings.get(default), timings.get(before), kept,
        dict(comparison.peers),
        {str(configs[int(label)].as_dict()): reason for label, reason in comparison.failed.items()},
    )  # fmt: skip


def _compare(
    runner: Runner, configs: Mapping[str, Config], budget_s: float, failed: Mapping[str, str]
) -> Comparison:
    """A comparison that brings its worker down is repeated without those who do so alone.

    Where none does it is repeated once as it is: a worker may have been killed from outside.

    Args:
        failed: label → why, of those that have failed already.
    """
    if not configs:
        return Comparison({}, {}, failed)
    try:
        found = runner.compare(configs, budget_s)
        return replace(found, failed={**failed, **found.failed})
    except RunnerError as error:
        culprits = {label: str(error) for label in configs}
    if len(configs) > 1:
        culprits = {}
        for label, config in configs.items():
            try:
                culprits.update(runner.compare({label: config}, 0.0).failed)
            except RunnerError as error:
                culprits[label] = str(error)
        if not culprits:
            return _compare_again(runner, configs, budget_s, failed)
    sound = {label: config for label, config in configs.items() if label not in culprits}
    return _compare(runner, sound, budget_s, {**failed, **culprits})


def _compare_again(
    runner: Runner, configs: Mapping[str, Config], budget_s: float, failed: Mapping[str, str]
) -> Comparison:
    try:
        found = runner.compare(configs, budget_s)
    except RunnerError as error:
        raise JetfireError(f"the finalists run alone but not in turn: {error}") from None
    return replace(found, failed={**failed, **found.failed})
