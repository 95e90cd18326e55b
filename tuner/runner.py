"""Where a search has its configs measured; it knows nothing of how they are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from jetfire.core.kernel import Config
from jetfire.measure.timer import Timing
from jetfire.tuner.trial import Measurement

ROUNDS = 15


@dataclass(frozen=True)
class Comparison:
    """Configs and peers timed in turn against each other.

    Attributes:
        configs, peers: label → its timing; those that failed their check are missing.
        failed: label → why.
    """

    configs: Mapping[str, Timing]
    peers: Mapping[str, Timing]
    failed: Mapping[str, str]


class TrialRunner(Protocol):
    """Measures configs of one problem at a time."""

    capacity: int
    """Configs worth having under way at once."""

    def submit(self, number: int, config: Config) -> None:
        """Begin to measure a config, as trial `number`."""

    def wait(self, timeout: float) -> list[tuple[int, Measurement]]:
        """What has come to an end, after at most so many seconds; at least one where there is."""

    def cancel(self) -> None:
        """Give up all that is under way."""

    def compare(
        self,
        configs: Mapping[str, Config],
        budget_s: float,
        rounds: int = ROUNDS,
        peers: bool = True,
    ) -> Comparison:
        """Measure again, all in turn, with the peers or without: the final word.

        Raises:
            RunnerError: it came to no end.
        """

    def now(self) -> float:
        """Seconds, from some time on."""

    def close(self) -> None:
        """Let go of processes and devices."""


class RunnerError(Exception):
    """A comparison that crashed or hung."""


class ReplayRunner:
    """Answers from recorded measurements, on a clock that runs as they did.

    Args:
        recorded: config → what became of it.
        slots: configs under way at once.
    """

    def __init__(self, recorded: Mapping[Config, Measurement], slots: int = 1) -> None:
        self.recorded = recorded
        self.capacity = slots
        self.seconds = 0.0
        self._queue: list[tuple[int, Config]] = []
        self._spent = 0.0  # on the first of the queue

    def submit(self, number: int, config: Config) -> None:
        self._queue.append((number, config))

    def wait(self, timeout: float) -> list[tuple[int, Measurement]]:
        number, config = self._queue[0]
        found = self.recorded.get(config, Measurement("illegal", message="not recorded"))
        left = found.seconds - self._spent
        if left > timeout:
            self.seconds += timeout
            self._spent += timeout
            return []
        self.seconds += left
        self._queue.pop(0)
        self._spent = 0.0
        return [(number, found)]

    def cancel(self) -> None:
        self._queue.clear()
        self._spent = 0.0

    def compare(
        self,
        configs: Mapping[str, Config],
        budget_s: float,
        rounds: int = ROUNDS,
        peers: bool = True,
    ) -> Comparison:
        timings, failed = {}, {}
        for label, config in configs.items():
            found = self.recorded.get(config)
            if found is None or found.ms is None:
                failed[label] = "not recorded" if found is None else found.message or found.outcome
            else:
                self.seconds += found.seconds
                timings[label] = _timing(found)
        return Comparison(timings, {}, failed)

    def now(self) -> float:
        return self.seconds

    def close(self) -> None:
        self._queue.clear()


def _timing(found: Measurement) -> Timing:
    assert found.ms is not None
    values = (found.ms_p20 or found.ms, found.ms, found.ms_p80 or found.ms)
    timing = Timing(found.ms, values[0], values[2], len(values), values=values)
    if found.joules is not None:
        energies = (found.joules,) * len(values)
        timing = replace(timing, watts=found.joules / found.ms * 1e3, energies=energies)
    return timing
