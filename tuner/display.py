"""What a person sees of the tuner: on stderr while it works, and in the end what it found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any, Self

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table as RichTable

from jetfire.core import terminal
from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.measure.results import problem_text, shape_text
from jetfire.report import counters, output
from jetfire.report.table import Table
from jetfire.report.text import fields_text, plural, significant, time_text, times
from jetfire.tuner.search import CountedSearch, FinishedSearch, SearchTarget
from jetfire.tuner.trial import OUTCOMES, Measurement, Objective, score

UNITS = {"time": "ms", "energy": "J", "both": "ms·J"}


def config_text(config: Config) -> str:
    return fields_text(config.as_dict())


class SearchDisplay:
    """The state of the search under way.

    Args:
        total: searches in all.
    """

    def __init__(self, objective: Objective, total: int) -> None:
        self.objective, self.total, self.index = objective, total, 0
        self._console = terminal.console(stderr=True)
        self._live: Live | None = None
        self.title, self.trials, self._end = "", 0, 0.0
        self._reset()

    def _reset(self) -> None:
        self.counts: Counter[str] = Counter()
        self.best: tuple[float, Config] | None = None
        self.first: float | None = None
        self._began, self._done = time.monotonic(), 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self.table,
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(
        self, title: str, trials: int, seconds: float, known: list[tuple[Config, Measurement]]
    ) -> None:
        """Show a new search.

        Args:
            trials, seconds: its limits.
            known: what earlier runs of its study found.
        """
        self._reset()
        self.index += 1
        self.title, self.trials, self._end = title, trials, time.monotonic() + seconds
        for config, measurement in known:
            self._count(config, measurement)
        self._done = 0
        earlier = f", {plural(len(known), 'trial')} known" if known else ""
        if self._live is None:
            self.note(f"[{self.index}/{self.total}] {title}{earlier}")

    def _count(self, config: Config, measurement: Measurement) -> bool:
        """Add a trial; True if it is the best so far."""
        self.counts[measurement.outcome] += 1
        self._done += 1
        values = measurement.values(self.objective)
        if measurement.outcome != "ok" or values is None:
            return False
        self.first = score(values) if self.first is None else self.first
        if self.best is not None and self.best[0] <= score(values):
            return False
        self.best = score(values), config
        return True

    def trial(self, config: Config, measurement: Measurement) -> None:
        better = self._count(config, measurement)
        if self._live is not None:
            return
        if better:
            self.note(f"trial {sum(self.counts.values())}: {self._level()} {config_text(config)}")
        elif not measurement.measured:
            reason = measurement.message.strip().splitlines() or [""]
            self.note(f"{measurement.outcome}: {config_text(config)}: {reason[0]}")

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._live is not None:
            self._live.console.print(f"jetfire: {terminal.line(text)}")
        else:
            terminal.note(text)

    def _level(self) -> str:
        if self.best is None or self.first is None:
            return ""
        value = f"{significant(self.best[0], 4)} {UNITS[self.objective]}"
        return f"{value} ({times(self.first / self.best[0])} the first)"

    def _eta(self) -> str:
        left = self._end - time.monotonic()
        tried = sum(self.counts.values())
        if self._done:
            rate = (time.monotonic() - self._began) / self._done
            left = min(left, rate * (self.trials - tried))
        seconds = max(0, round(left))
        return f"{seconds // 60}:{seconds % 60:02d}"

    def table(self) -> RenderableType:
        table = RichTable(title=f"[{self.index}/{self.total}] {self.title}", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        if self.best is not None:
            table.add_row("best so far", self._level())
            table.add_row("config", config_text(self.best[1]))
        outcomes = " · ".join(f"{o} {self.counts[o]}" for o in OUTCOMES if self.counts[o])
        table.add_row("trials", f"{sum(self.counts.values())} of {self.trials}: {outcomes}")
        table.add_row("left", f"at most {self._eta()}")
        return table


# What was found.

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
SPARE = ("failed", "trials", "× peer", "default")  # what goes first where a terminal is narrow


def show(tuned: Sequence[FinishedSearch], device: Device, form: str = "table") -> None:
    """Give what searches came to, with the gains' mean where a default could run.

    Of no searches there is no table; other forms are a document without any.
    """
    searches = [_record(one) for one in tuned]
    output.give(
        form,
        {"device": device.label, "searches": searches},
        lambda: _print(tuned, device) if tuned else None,
        lambda: {device.label: _table(tuned)} if tuned else {},
        lambda: searches,
    )


def _record(tuned: FinishedSearch) -> dict[str, Any]:
    target, final = tuned.target, tuned.final
    return {
        "op": target.kernel.op,
        "kernel": target.kernel.name,
        "problem": target.case.problem.as_dict(),
        "config": final.config.as_dict(),
        "ms": final.timing.ms,
        "default_ms": None if final.default is None else final.default.ms,
        "gain": final.gain,
        "vs_peer": final.vs_peer,
        "trials": len(tuned.trials),
        "saved": tuned.saved,
    }


def _table(tuned: Sequence[FinishedSearch]) -> Table:
    return Table(COLUMNS, [_row(one) for one in tuned], left=(0, 1, 2, 6, 9))


def _print(tuned: Sequence[FinishedSearch], device: Device) -> None:
    terminal.console(width=240).print(_table(tuned).rich(folded=(0, 2), spare=SPARE))
    gains = [one.final.gain for one in tuned if one.final.gain is not None]
    if gains:
        speed = f"{geometric_mean(gains):.3f}× the defaults' speed"
        print(f"{device.label}: {speed}, geometric mean of {len(gains)}")


def show_counted(counted: Sequence[CountedSearch]) -> None:
    """Give the counters of winners beside those of the defaults, and where the two differ most."""
    found = [
        {
            "op": one.target.kernel.op,
            "kernel": one.target.kernel.name,
            "problem": one.target.case.problem.as_dict(),
            "counters": one.winner,
            "default_counters": one.default,
            "said": one.said,
        }
        for one in counted
    ]
    terminal.result({"counted": found}, lambda: _print_counted(counted))


def _print_counted(counted: Sequence[CountedSearch]) -> None:
    lines = []
    for one in counted:
        sides = counters.sides(one.winner, one.default)
        lines += [(_searched(one.target), name, found) for name, found in sides.items()]
    table = counters.table(lines)
    console = terminal.console(width=240)
    folded = (0, len(table.head) - 1)
    console.print(table.rich(folded=folded, spare=counters.SPARE))
    for one in counted:
        console.print(f"{_searched(one.target)}: {one.said}", soft_wrap=True)
    for line in counters.footnotes([found for _, _, found in lines]):
        console.print(line, soft_wrap=True)


def _searched(target: SearchTarget) -> str:
    problem = target.case.problem.as_dict()
    return f"{target.kernel.op} {shape_text(problem, problem)} {target.kernel.name}"


def changes(config: Config, default: Config) -> str:
    """Return the fields in which a config is not the default."""
    usual = default.as_dict()
    found = {name: v for name, v in config.as_dict().items() if v != usual[name]}
    return problem_text(found) or "the default"


def _row(tuned: FinishedSearch) -> tuple[str, ...]:
    target, final = tuned.target, tuned.final
    problem = target.case.problem.as_dict()
    failed = sum(not measurement.measured for _, measurement in tuned.trials)
    peers = [f"{times(ratio)} {name}" for name, ratio in final.vs_peer.items()]
    return (
        f"{target.kernel.op} {shape_text(problem, problem)}",
        target.kernel.name,
        changes(final.config, target.space.base),
        time_text(final.timing.ms),
        "fails" if final.default is None else time_text(final.default.ms),
        "" if final.gain is None else times(final.gain, 3),
        "\n".join(peers),
        str(len(tuned.trials)),
        str(failed) if failed else "",
        "written" if tuned.saved else "stays",
    )
