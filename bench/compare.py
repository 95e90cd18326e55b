"""`jetfire compare`: two results files, row by row, and whether the second is slower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import terminal
from jetfire.core.errors import RegressionError, UsageError, WrongResultError
from jetfire.core.terminal import note
from jetfire.measure import noise
from jetfire.measure.results import Results, Row, problem_text, shape_text
from jetfire.report import output, show
from jetfire.report.rows import grouped, varying
from jetfire.report.table import Table
from jetfire.report.text import fixed, interval_text, plural, spread_text, time_text

if TYPE_CHECKING:
    from jetfire.report.fitted import FittedTable

Verdict = Literal["faster", "slower", "noise", "unsure", "broken", "mended"]
NAMED = 3  # rows of one file alone that are named; of the others the count is said


def time_of(row: Row) -> float | None:
    """Return a row's time in milliseconds; a wrong result has none, whatever its file says."""
    return None if row.ok is False else row.ms


def name_of(row: Row) -> str:
    return f"{row.op} {row.label} {problem_text(row.problem)}"


@dataclass(frozen=True)
class Pair:
    """One thing measured before and after."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float | None:
        """Time after over time before: above 1 is slower. None where one has no time."""
        before, after = time_of(self.before), time_of(self.after)
        return None if before is None or after is None else after / before

    @property
    def verdict(self) -> Verdict:
        """Noise where the two spans between 20th and 80th percentile overlap.

        Where they do not, but the ratio's interval holds 1, the samples are too few to be sure.
        """
        if time_of(self.after) is None:
            return "broken"
        if self.ratio is None:
            return "mended"
        if not self.apart:
            return "noise"
        if self.interval is not None and self.interval[0] <= 1 <= self.interval[1]:
            return "unsure"
        return "slower" if self.ratio > 1 else "faster"

    @property
    def apart(self) -> bool:
        """The two spans between 20th and 80th percentile do not overlap."""
        before, after = _span(self.before), _span(self.after)
        return before[0] > after[1] or after[0] > before[1]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ratio's, as `noise.interval` has it; None where one has no time, or too little."""
        return None if self.ratio is None else noise.interval(self.before, self.after)

    @property
    def never_right(self) -> bool:
        """Broken in both, so that nothing says whether it became slower."""
        return self.verdict == "broken" and time_of(self.before) is None

    def slower_by(self, share: float) -> bool:
        """Return whether it takes longer by more than a share, be that noise or not."""
        return self.ratio is not None and self.ratio > 1 + share

    def regressed(self, by: float) -> bool:
        """Return whether it is slower by more than a share, spans apart, or right no longer."""
        if self.verdict == "broken":
            return not self.never_right
        return self.slower_by(by) and self.apart


def _span(row: Row) -> tuple[float, float]:
    ms = row.ms or 0.0
    return row.ms_p20 or ms, row.ms_p80 or ms


@dataclass(frozen=True)
class Match:
    """The rows of two files: those that measure the same thing, and those of one file alone."""

    pairs: list[Pair]
    gone: list[Row]
    new: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """Return both rows of each pair with what the table says, and the rows of one file."""
        pairs = [
            {
                "verdict": pair.verdict,
                "ratio": pair.ratio,
                "interval": pair.interval,
                "before": pair.before.as_dict(),
                "after": pair.after.as_dict(),
            }
            for pair in self.pairs
        ]
        gone, new = ([row.as_dict() for row in rows] for rows in (self.gone, self.new))
        return {"pairs": pairs, "gone": gone, "new": new}


def parse_share(text: str, option: str = "--fail-on-regression") -> float:
    """Return the share of ``5%`` or ``0.05``, which an option was given.

    Raises:
        UsageError: it is neither; a bare 5 might be meant as 5%, and would pass all up to 6×.
    """
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?(%?)", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share < (10 if found and found[2] else 1):
        raise UsageError(f"{option} {text}: expected a share such as 5% or 0.05")
    return share


def match(
    before: Results,
    after: Results,
    config: bool = True,
    names: tuple[str, str] = ("the first file", "the second file"),
) -> Match:
    """Return which rows of two files measure the same thing.

    Args:
        config: rows whose configs differ measure different things.
        names: the files, as an error names them.

    Raises:
        UsageError: a file measures one thing twice.
    """
    old, new = _by_key(before, config, names[0]), _by_key(after, config, names[1])
    return Match(
        [Pair(row, new[key]) for key, row in old.items() if key in new],
        [row for key, row in old.items() if key not in new],
        [row for key, row in new.items() if key not in old],
    )


def _by_key(results: Results, config: bool, name: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in results.rows:
        if found.setdefault(row.key(config), row) is not row:
            hint = "" if config else ", with several configs: leave out --ignore-config"
            raise UsageError(f"{name}: {name_of(row)} is there twice{hint}")
    return found


HEAD = ("problem", "kernel", "before", "p20–p80", "after", "p20–p80", "ratio", "95%", "")
ALONE = ("op", "problem", "kernel", "time")
_STYLES = {
    "slower": "red",
    "broken": "red",
    "faster": "green",
    "mended": "green",
    "noise": "dim",
    "unsure": "dim",
}


def table(pairs: Sequence[Pair]) -> FittedTable:
    """Return the pairs of one op for the terminal, the worst first."""
    made = Table(HEAD, left=(0, 1, len(HEAD) - 1)).rich(folded=(0,), spare=("p20–p80", "95%"))
    for pair, texts in _rows(pairs):
        made.add_row(*texts, style=_STYLES[pair.verdict])
    return made


def _rows(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, list[str]]]:
    """Yield the pairs of one op, the worst first, with the texts of its line."""
    rows = [pair.after for pair in pairs]
    _, differing = varying(rows)
    several = len({row.data for row in rows}) > 1
    for pair in sorted(pairs, key=_badness, reverse=True):
        data = f" data={pair.after.data}" if several else ""
        yield (
            pair,
            [
                shape_text(pair.after.problem, differing) + data,
                pair.after.label,
                time_text(time_of(pair.before)),
                spread_text(pair.before),
                time_text(time_of(pair.after)),
                spread_text(pair.after),
                fixed(pair.ratio, 3),
                interval_text(pair.interval),
                pair.verdict,
            ],
        )


def _tables(found: Match, a: Path, b: Path) -> dict[str, Table]:
    """Return a table for each op, and one of the rows that each file has alone, for Markdown."""
    tables = {
        op: Table(HEAD, [texts for _, texts in _rows(same)], (0, 1, len(HEAD) - 1))
        for op, same in grouped(found.pairs, lambda pair: pair.after.op).items()
    }
    for file, other, rows in ((a, b, found.gone), (b, a, found.new)):
        if rows:
            lines = [
                [row.op, problem_text(row.problem), row.label, time_text(time_of(row))]
                for row in rows
            ]
            tables[f"In {file} and not in {other}"] = Table(ALONE, lines, (0, 1, 2))
    return tables


def _lines(found: Match) -> list[dict[str, Any]]:
    """Return a record per row of either file, for CSV; the verdict says which file lacks it."""
    lines = [
        {
            "verdict": pair.verdict,
            "ratio": pair.ratio,
            **dict(zip(("ratio_low", "ratio_high"), pair.interval or (None, None), strict=True)),
            **_named(pair.after),
            **_times("before", pair.before),
            **_times("after", pair.after),
        }
        for pair in found.pairs
    ]
    lines += [{"verdict": "gone", **_named(row), **_times("before", row)} for row in found.gone]
    lines += [{"verdict": "new", **_named(row), **_times("after", row)} for row in found.new]
    return lines


def _times(when: str, row: Row) -> dict[str, float | None]:
    """Return a row's time and its percentiles, for CSV."""
    found = {"ms": time_of(row), "ms_p20": row.ms_p20, "ms_p80": row.ms_p80}
    return {f"{when}_{name}": ms for name, ms in found.items()}


def _named(row: Row) -> dict[str, Any]:
    """Return what tells a row from others, for CSV."""
    return {"op": row.op, "kernel": row.label, "data": row.data, "problem": row.problem}


def _badness(pair: Pair) -> float:
    return float("inf") if pair.ratio is None else pair.ratio


def compare(
    a: Path, b: Path, fail_on: str | None, config: bool = True, form: str = "table"
) -> None:
    """Show how B stands to A, in one of `report.output.FORMATS`.

    Raises:
        UsageError: a file cannot be read, nothing in them matches, or `fail_on` is given and they
            are of different devices or A has no kernel's row.
        RegressionError: as `judge` says.
        WrongResultError: likewise.
    """
    share = None if fail_on is None else parse_share(fail_on)
    before, after = Results.load(a), Results.load(b)
    found = match(before, after, config, (str(a), str(b)))
    if not found.pairs:
        first = found.gone[:1]
        hints = [f": {name_of(row)}{hint}" for row in first if (hint := _hint(row, found.new))]
        text = "no row of one measures what a row of the other does"
        raise UsageError(f"{a} and {b}: {text}{''.join(hints)}")
    names = list(dict.fromkeys(str(r.device.get("name")) for r in (before, after)))
    title = f"{a} → {b} on {' → '.join(names)}; ratio above 1 is slower"
    value = {"devices": names, **found.as_dict()}
    output.give(
        form,
        value,
        lambda: _print(found, title, a, b),
        lambda: _tables(found, a, b),
        lambda: _lines(found),
    )
    if any(_timer(before, pair.before) != _timer(after, pair.after) for pair in found.pairs):
        note("rows of the two files were timed by different versions of the timer")
    if share is None:
        return
    if len(names) > 1:
        raise UsageError(f"{a} is of {names[0]}, {b} of {names[1]}: expected one device to judge")
    judge(found, share)


def _timer(results: Results, row: Row) -> object:
    return results.measured(row).get("timer")


def _print(found: Match, title: str, a: Path, b: Path) -> None:
    console = terminal.console(width=160)
    for part in grouped(found.pairs, lambda pair: pair.after.op).values():
        console.print(show.heading(title, [pair.after for pair in part]), soft_wrap=True)
        console.print(table(part))
    sides = (a, b, found.gone, found.new), (b, a, found.new, found.gone)
    for file, other, rows, others in sides:
        if rows:
            more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            named = [f"{name_of(row)}{_hint(row, others)}" for row in rows[:NAMED]]
            listed = f"{', '.join(named)}{more}"
            console.print(f"in {file} and not in {other}: {listed}", soft_wrap=True, markup=False)


def judge(found: Match, share: float) -> None:
    """Fail unless every kernel's row of the first file is right and as fast in the second.

    Peers and rows of the second file alone are not judged. Rows that are slower by more than the
    share, but within noise, pass with a note.

    Raises:
        UsageError: the first file has no kernel's row.
        RegressionError: a row is slower by more than the share and beyond noise, is right no
            longer, or is missing.
        WrongResultError: none of these, but a row is broken in both files.
    """
    pairs = [pair for pair in found.pairs if pair.before.role == "kernel"]
    gone = [row for row in found.gone if row.role == "kernel"]
    if not pairs and not gone:
        raise UsageError("the first file has no kernel's row: nothing to judge")
    worse = sorted((pair for pair in pairs if pair.regressed(share)), key=_badness, reverse=True)
    broken = [pair.after for pair in worse if pair.verdict == "broken"]
    slower = [pair for pair in worse if pair.verdict != "broken"]
    of = f"of {plural(len(pairs) + len(gone), 'kernel row')}"
    by = f"slower by more than {100 * share:g}%"
    parts = []
    if slower:
        parts.append(f"{len(slower)} {by}, {_longer(slower[0])}")
    if broken:
        parts.append(f"{len(broken)} broken, {name_of(broken[0])}")
    if gone:
        parts.append(f"{len(gone)} missing, {name_of(gone[0])}{_hint(gone[0], found.new)}")
    if parts:
        raise RegressionError(f"{len(worse) + len(gone)} {of} regressed: {'; '.join(parts)}")
    never = [name_of(pair.after) for pair in pairs if pair.never_right]
    if never:
        raise WrongResultError(f"{len(never)} {of} broken in both files: {never[0]}")
    unclear = sorted((pair for pair in pairs if pair.slower_by(share)), key=_badness, reverse=True)
    if unclear:
        note(f"{len(unclear)} {of} {by}, but within noise: {_longer(unclear[0])}")


def _longer(pair: Pair) -> str:
    return f"{name_of(pair.after)} takes {pair.ratio:.2f}× as long"


def _hint(lone: Row, others: Sequence[Row]) -> str:
    """Say so where only the config, or the data, of a row is another in the other file.

    Args:
        others: the rows that the other file has alone.
    """
    for row in others:
        if row.key(config=False) == lone.key(config=False):
            return " (there with another config: --ignore-config matches them)"
        if (row.op, row.label, row.problem) == (lone.op, lone.label, lone.problem):
            return f" (there with data {row.data})"
    return ""
