"""The loop: ask the study for configs, have the runner measure them, tell the study."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jetfire.core import interrupts
from jetfire.core.files import Unwritable, add, append
from jetfire.core.kernel import Config
from jetfire.tuner.runner import TrialRunner
from jetfire.tuner.strategies import Exhausted
from jetfire.tuner.study import StorageError, Study
from jetfire.tuner.trial import Measurement

# A search of which nothing is known yet may take longer than it has, so that something is.
GRACE_S = 4.0
LEAST_AHEAD = 4
Progress = Callable[[Config, Measurement], None]


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
                study.tell(number, config, measurement)
                _log(study.log, number, config, measurement)
                progress(config, measurement)
    finally:
        with interrupts.deferred():
            runner.cancel()
            study.give_up()


def _log(file: Path, number: int, config: Config, measurement: Measurement) -> None:
    """Failures with all that is known of them."""
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
