"""What became of a config that was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Outcome = Literal["ok", "slow", "illegal", "compile", "timeout", "crash", "wrong"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Objective = Literal["time", "energy", "both"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Measurement:
    """One config's fate.

    Attributes:
        outcome: ``ok``; ``slow``, hopeless after a first look, of which `ms` is all there is; or
            why there is no time: ``illegal``, ``compile``, ``timeout``, ``crash``, ``wrong``.
        ms, ms_p20, ms_p80: milliseconds a call: the median and two percentiles.
        joules: energy a call, where it was asked for and can be read.
        message: all that is known of a failure.
        seconds: wall time that it cost.
    """

    outcome: Outcome
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    joules: float | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def measured(self) -> bool:
        return self.outcome in ("ok", "slow")

    def values(self, objective: Objective) -> list[float] | None:
        """What is to be small; None where it was not measured."""
        wanted = {"time": [self.ms], "energy": [self.joules], "both": [self.ms, self.joules]}
        found = [value for value in wanted[objective] if value is not None]
        return found if self.measured and len(found) == len(wanted[objective]) else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, attributes: Mapping[str, Any]) -> Measurement:
        """From `as_dict`'s fields among others."""
        return cls(**{f.name: attributes[f.name] for f in fields(cls) if f.name in attributes})


def digits(value: float) -> float:
    """Six digits: no clock gives more, and what is kept is read by people too."""
    return float(f"{value:.6g}")


def score(values: Sequence[float]) -> float:
    """One number to rank by: the value, or of several their product (energy × delay)."""
    product = 1.0
    for value in values:
        product *= value
    return product
