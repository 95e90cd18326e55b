"""The final comparison: the best few, the incumbent and the default, timed in turn once more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetfire.bench.timer import Timing
from jetfire.ops.errors import JetfireError, UsageError, WrongResultError
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
        incumbent: the timing of the config in use before; the default's where there was no profile.
        kept: the incumbent stays.
        peers: name → timing.
        failed: config's label → why it was left out.
    """

    config: Config
    timing: Timing
    default: Timing | None
    incumbent: Timing | None
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
            "incumbent_ms": None if self.incumbent is None else self.incumbent.ms,
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
    runner: Runner, finalists: Sequence[Config], default: Config, incumbent: Config | None,
    objective: Objective, budget_s: float,
) -> Final:  # fmt: skip
    """Compare, and keep the incumbent (else the default) unless a finalist beats it.

    Raises:
        JetfireError: neither the default nor any finalist is right.
    """
    holder = default if incumbent is None else incumbent
    configs = list(dict.fromkeys([holder, default, *finalists]))
    comparison = _compare(runner, configs, budget_s)
    timings = {configs[int(label)]: timing for label, timing in comparison.configs.items()}
    if not timings:
        raise _nothing(comparison)
    best = min(timings, key=lambda config: float(np.median(costs(timings[config], objective))))
    held = timings.get(holder)
    kept = held is not None and not beats(timings[best], held, objective)
    winner = holder if kept else best
    return Final(
        winner, timings[winner], timings.get(default), held, kept, dict(comparison.peers),
        {str(configs[int(label)].as_dict()): reason for label, reason in comparison.failed.items()},
    )  # fmt: skip


def _compare(runner: Runner, configs: list[Config], budget_s: float) -> Comparison:
    """A comparison that brings its worker down is tried again with one challenger fewer."""
    while True:
        try:
            return runner.compare({str(i): c for i, c in enumerate(configs)}, budget_s)
        except RunnerError as error:
            if len(configs) == 1:
                raise JetfireError(str(error)) from None
            configs.pop()


def _nothing(comparison: Comparison) -> JetfireError:
    reason = next(iter(comparison.failed.values()), "nothing was measured")
    kind = WrongResultError if comparison.failed else UsageError
    return kind(f"no config is right: {reason}")
