"""A whole search over a recorded space, without a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import optuna

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.tuner.final import Final, decide
from jetfire.tuner.recording import Recording
from jetfire.tuner.runner import ReplayRunner
from jetfire.tuner.search import Limits, search
from jetfire.tuner.strategies import strategy_of
from jetfire.tuner.study import Identity, Study


@dataclass(frozen=True)
class Replayed:
    """What a search found.

    Attributes:
        ms: the winner's recorded time.
        trials: configs that were looked at.
        seconds: that it would have taken.
    """

    config: Config
    ms: float
    trials: int
    seconds: float
    final: Final


def _unheard(*_: object) -> None:
    pass


def replayed(
    recording: Recording, strategy: str, trials: int, seed: int, budget_s: float = math.inf
) -> Replayed:
    """Search a recorded space from its default config on, and decide as the tuner does.

    Raises:
        UsageError: there is no such strategy.
        WrongResultError: none of the configs that were looked at is right.
    """
    space = recording.space()
    default = space.point(recording.base.as_dict())
    first = [default] if default is not None and space.legal(default) else []
    identity = Identity(
        recording.kernel, recording.problem, Device("cpu", name="replay"), space, "time", "normal"
    )
    study = Study(
        identity,
        strategy_of(strategy, space, seed, first),
        optuna.storages.InMemoryStorage(),
        _unheard,
        {"strategy": strategy},
    )
    runner = ReplayRunner(recording.trials)
    search(study, runner, Limits(trials, budget_s), _unheard)
    best = study.best(3)
    holder = recording.base if recording.base in recording.trials or not best else best[0]
    final = decide(runner, best, holder, holder, False, "time", math.inf)
    return Replayed(final.config, final.timing.ms, len(study.finished()), runner.now(), final)
