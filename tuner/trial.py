"""What became of a config that was tried, and of several compared in turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from jetfire.core import schema
from jetfire.core.files import MIB, Unreadable
from jetfire.core.schema import Measured, NotNegative

if TYPE_CHECKING:
    from jetfire.core.kernel import Config
    from jetfire.measure.timer import Timing

Outcome = Literal["ok", "slow", "illegal", "compile", "timeout", "crash", "wrong"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Objective = Literal["time", "energy", "both"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Measurement:
    """What came of trying one config.

    Attributes:
        outcome: ``ok``; ``slow``, hopeless after a first look, of which `ms` is all there is; or
            why there is no time: ``illegal``, ``compile``, ``timeout``, ``crash``, ``wrong``.
        ms, ms_p20, ms_p80: milliseconds a call: the median and two percentiles.
        joules: energy per call, where it was asked for and can be read.
        message: all that is known of a failure.
        seconds: wall time that it cost.
        limit: seconds that it was given (``--trial-timeout``), where they were too few.
    """

    outcome: Outcome
    ms: Measured | None = None
    ms_p20: Measured | None = None
    ms_p80: Measured | None = None
    joules: NotNegative | None = None
    message: Annotated[str, Field(max_length=MIB)] = ""
    seconds: NotNegative = 0.0
    limit: NotNegative | None = None

    def lacked_time(self, trial_s: float) -> bool:
        """Return whether it was given fewer seconds than these, and they were too few."""
        return self.outcome == "timeout" and self.limit is not None and self.limit < trial_s

    @property
    def measured(self) -> bool:
        return self.outcome in ("ok", "slow")

    def values(self, objective: Objective) -> list[float] | None:
        """Return what the objective minimises (ms, joules, or both), where it was measured."""
        wanted = {"time": [self.ms], "energy": [self.joules], "both": [self.ms, self.joules]}
        found = [value for value in wanted[objective] if value is not None]
        return found if self.measured and len(found) == len(wanted[objective]) else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, attributes: Mapping[str, Any]) -> Measurement | None:
        """Return what a study's trial says of its config, by the names of `as_dict`.

        Returns:
            None where it says nothing, or what cannot be.
        """
        message = attributes.get("message")
        text = message.encode(errors="replace").decode() if isinstance(message, str) else ""
        try:
            return schema.convert({**attributes, "message": text[:MIB]}, cls, Path())
        except Unreadable:
            return None


def digits(value: float) -> float:
    """Return a number to six digits: no clock gives more, and people read what is kept."""
    return float(f"{value:.6g}")


def score(values: Sequence[float]) -> float:
    """Return one number to rank by: the value, or of several their product (energy × delay)."""
    return math.prod(values, start=1.0)


@dataclass(frozen=True)
class Comparison:
    """Configs and peers timed in turn against each other.

    Attributes:
        configs, peers: config, or name → its timing; those that failed their check are missing.
        failed: config → why.
        digests: config → the SHA-256 of its outputs' bytes.
        left_out: the peers that were not timed, each with the reason.
    """

    configs: Mapping[Config, Timing]
    peers: Mapping[str, Timing]
    failed: Mapping[Config, str]
    digests: Mapping[Config, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()


class RunnerError(Exception):
    """What keeps a runner from measuring at all: a job cannot be set up, or a comparison failed."""
