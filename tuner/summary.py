"""What a run of the tuner found, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.kernel import Config, Kernel
from jetfire.measure.results import problem_text, shape_text
from jetfire.report.table import Table
from jetfire.report.text import mean, time_text, times
from jetfire.tuner.final import Final
from jetfire.tuner.trial import Measurement

if TYPE_CHECKING:
    from rich.table import Table as RichTable

COLUMNS = (
    "problem",
    "kernel",
    "config, where not the default's",
    "time",
    "default",
    "gain",
    "× peer",
    "trials",
    "failed",
    "profile",
)


@dataclass(frozen=True)
class SearchOutcome:
    """One search's end.

    Attributes:
        default: the kernel's default config.
        saved: the profile was written; else the one that was there stays.
    """

    kernel: Kernel
    problem: Any
    default: Config
    final: Final
    trials: Sequence[tuple[Config, Measurement]]
    saved: bool


def mean_gain(outcomes: Sequence[SearchOutcome]) -> float | None:
    """The geometric mean of the gains over the defaults; None where every default failed."""
    gains = [o.final.gain for o in outcomes if o.final.gain is not None]
    return mean(gains) if gains else None


def show(outcomes: Sequence[SearchOutcome], device: Device) -> None:
    """Print the outcomes on stdout."""
    gain = mean_gain(outcomes)
    terminal.console(width=240).print(_table(outcomes))
    if gain is not None:
        print(
            f"{device.label}: {gain:.3f}× the defaults' speed, geometric mean of "
            f"{sum(o.final.gain is not None for o in outcomes)}"
        )


def _table(outcomes: Sequence[SearchOutcome]) -> RichTable:
    table = Table(COLUMNS, [_row(outcome) for outcome in outcomes], left=(0, 1, 2, 6, 9))
    return table.rich(folded=range(len(COLUMNS)))


def changes(config: Config, default: Config) -> str:
    """The fields in which a config is not the default."""
    usual = default.as_dict()
    found = {name: v for name, v in config.as_dict().items() if v != usual[name]}
    return problem_text(found) or "the default"


def _row(outcome: SearchOutcome) -> tuple[str, ...]:
    final, problem = outcome.final, outcome.problem.as_dict()
    failed = sum(not measurement.measured for _, measurement in outcome.trials)
    peers = [f"{times(ratio)} {name}" for name, ratio in final.vs_peer.items()]
    return (
        f"{outcome.kernel.op} {shape_text(problem, problem)}",
        outcome.kernel.name,
        changes(final.config, outcome.default),
        time_text(final.timing.ms),
        "fails" if final.default is None else time_text(final.default.ms),
        "" if final.gain is None else times(final.gain, 3),
        "\n".join(peers),
        str(len(outcome.trials)),
        str(failed) if failed else "",
        "written" if outcome.saved else "stays",
    )
