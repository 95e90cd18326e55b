"""`jetfire history`: results of many commits, and the commit at which a kernel became slower."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, median, median_high, median_low

from jetfire.bench.compare import name_of, parse_share, time_of
from jetfire.bench.records import OTHERS
from jetfire.core import checkout, files, terminal
from jetfire.core.errors import RegressionError, UsageError
from jetfire.core.files import Unreadable
from jetfire.core.terminal import note
from jetfire.measure import noise
from jetfire.measure.results import Results, Row
from jetfire.report import output
from jetfire.report.page import check_page
from jetfire.report.rows import grouped
from jetfire.report.show import BASELINES
from jetfire.report.table import Table
from jetfire.report.text import plural, share, time_text, times

LEAST_RUNS = 2  # on either side of a change: one alone may have been disturbed
LEAST = math.log(1.02)  # a change that is worth a line
CHANCE = 0.001  # the share of histories without any change in which one is reported
AGREE = 0.5  # of a step of the ratio to the peer, what the own time must have moved by
_OF_DIFFERENCE = 1.4826 / math.sqrt(2)  # the deviation, over the median difference of two samples


@dataclass(frozen=True)
class MeasuredRun:
    """One results file.

    Attributes:
        commit: 40 or 64 digits, with ``+`` where files differed from it; empty where unknown.
        time: when it was measured, as ISO 8601 has it, of old files the day; empty where unknown.
    """

    file: Path
    results: Results

    @property
    def device(self) -> str:
        return str(self.results.device.get("name"))

    @property
    def commit(self) -> str:
        return self.results.device.get("commit") or ""

    @property
    def time(self) -> str:
        device = self.results.device
        return device.get("time") or device.get("date") or ""

    @property
    def name(self) -> str:
        """The commit's first digits; of a run without a commit the file's name."""
        if not self.commit:
            return self.file.name
        return self.commit[:9] + ("+" if self.commit.endswith("+") else "")


@dataclass(frozen=True)
class Point:
    """A series' row in one run."""

    run: MeasuredRun
    row: Row

    @property
    def ms(self) -> float:
        return self.row.ms or 0.0


@dataclass(frozen=True)
class Change:
    """A new level of a series.

    Attributes:
        at: the index of its first run.
        rise: time after over time before, above 1 is slower; of ratios to the peer, if it has one.
        before, after: the two levels of the kernel's own time, in milliseconds.
        noise: how far runs scatter, as a share of the time.
        stands: no later level undoes half of it.
    """

    series: KernelTimes
    at: int
    rise: float
    before: float
    after: float
    noise: float
    stands: bool

    @property
    def verdict(self) -> str:
        if self.rise < 1:
            return "faster"
        return "slower" if self.stands else "mended since"

    @property
    def first(self) -> MeasuredRun:
        return self.series.points[self.at].run

    @property
    def last(self) -> MeasuredRun:
        return self.series.points[self.at - 1].run


@dataclass(frozen=True)
class KernelTimes:
    """One thing measured on one device, run after run.

    Attributes:
        peer: timed beside it in every run; what a hot machine does to both cancels in the ratio.
    """

    device: str
    points: Sequence[Point]

    @property
    def row(self) -> Row:
        return self.points[-1].row

    @cached_property
    def peer(self) -> str | None:
        in_all = set.intersection(*(set(point.row.vs_peer or ()) for point in self.points))
        return next((name for name in (*BASELINES, *sorted(in_all)) if name in in_all), None)

    @cached_property
    def own(self) -> list[float]:
        """Logarithms of the times."""
        return [math.log(point.ms) for point in self.points]

    @cached_property
    def values(self) -> list[float]:
        """Return logarithms of the times over the peer's, or of the times without a peer."""
        if self.peer is None:
            return self.own
        return [-math.log((point.row.vs_peer or {})[self.peer]) for point in self.points]

    @cached_property
    def between(self) -> float:
        """Return how far one run is from the next, as a deviation, less a few changes of level."""
        steps = [abs(b - a) for a, b in zip(self.values, self.values[1:], strict=False)]
        return _OF_DIFFERENCE * median(steps) if steps else 0.0

    @cached_property
    def within(self) -> float:
        """Return how far the samples of a run scatter, by the percentiles that the timer gave."""
        return median([noise.scatter(point.row) or 0.0 for point in self.points])


def read(paths: Sequence[Path]) -> tuple[list[MeasuredRun], list[Unreadable]]:
    """Return the runs of files, and of all results in folders, and what cannot be read.

    Raises:
        UsageError: a folder holds no results.
    """
    runs, damaged = [], []
    for file in dict.fromkeys(file for path in paths for file in _files(path)):
        try:
            runs.append(MeasuredRun(file, Results.load(file)))
        except Unreadable as error:
            damaged.append(error)
    return runs, damaged


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    every = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
    if found := [file for file in every if not any(map(file.match, OTHERS))]:
        return found
    raise UsageError(f"{path}: expected results, files named .json or .json.gz")


def ordered(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return runs in the order of their commits, where this repository has all, else of time."""
    commits = {run.commit.rstrip("+") for run in runs}
    places = None if "" in commits else checkout.order(commits)
    if places is None and commits != {""}:
        note("not every run's commit is in this folder's repository: runs are ordered by time")
    known = places or dict.fromkeys(commits, 0)
    return sorted(runs, key=lambda run: (known[run.commit.rstrip("+")], run.time, str(run.file)))


def series_of(runs: Sequence[MeasuredRun]) -> list[KernelTimes]:
    """Return what was measured, by device, timer, kernel and problem, the fastest config.

    Rows that are wrong count as missing.
    """
    points = [Point(run, row) for run in runs for row in _timed(run.results.rows)]

    def key(point: Point) -> tuple[str, object, str]:
        timer = point.run.results.measured(point.row).get("timer")
        return point.run.device, timer, point.row.key(config=False)

    return [KernelTimes(same[0].run.device, same) for same in grouped(points, key).values()]


def _timed(rows: Sequence[Row]) -> list[Row]:
    timed = [row for row in rows if row.role == "kernel" and time_of(row) is not None]
    alike = grouped(timed, lambda row: row.key(config=False)).values()
    return [min(same, key=lambda row: row.ms or 0.0) for same in alike]


def changes(every: Sequence[KernelTimes]) -> list[Change]:
    """Return all changes of level, slowdowns that stand first, the largest first.

    A series is split where two medians fit it best, and each part again, as long as a level moved
    by more than chance would move one anywhere in a thousandth of all histories (Bonferroni's
    bound, over all places). Runs deviate by the largest of three: by what a run's samples do, by
    what the series' runs do, and by the median of what the runs of the device's series do.
    """
    found = []
    places = sum(len(series.points) for series in every)
    sure = NormalDist().inv_cdf(1 - CHANCE / (2 * max(1, places)))
    for same in grouped(every, lambda series: series.device).values():
        usual = median([series.between for series in same])
        for series in same:
            deviation = max(series.within, series.between, usual)
            found += _changes(series, deviation, sure * noise.OF_MEDIAN * deviation)
    rank = {"slower": 0, "mended since": 1, "faster": 2}
    return sorted(found, key=lambda change: (rank[change.verdict], -change.rise))


def _changes(series: KernelTimes, deviation: float, sure: float) -> list[Change]:
    splits = [0, *_splits(series, sure, 0, len(series.points)), len(series.points)]
    found = []
    for low, at, high in zip(splits, splits[1:], splits[2:], strict=False):
        step = _step(series, low, at, high)
        left = _step(series, low, at, high, splits[-2])  # of the step, in the last level
        ends = ((low, at), (at, high))
        before, after = (median(p.ms for p in series.points[a:b]) for a, b in ends)
        stands = left > step / 2
        found.append(Change(series, at, math.exp(step), before, after, deviation, stands))
    return [change for change in found if change.rise != 1]


def _splits(series: KernelTimes, sure: float, low: int, high: int) -> Iterator[int]:
    """Yield where the levels between two indices change, in order.

    Args:
        sure: by how much two runs would have to differ.
    """
    if high - low < 2 * LEAST_RUNS:
        return
    inner = range(low + LEAST_RUNS, high - LEAST_RUNS + 1)
    values = series.values
    at = min(inner, key=lambda i: _misfit(values[low:i]) + _misfit(values[i:high]))
    error = sure * math.sqrt(1 / (at - low) + 1 / (high - at))
    if abs(_step(series, low, at, high)) > max(LEAST, error):
        yield from _splits(series, sure, low, at)
        yield at
        yield from _splits(series, sure, at, high)


def _misfit(values: Sequence[float]) -> float:
    middle = median(values)
    return math.fsum(abs(value - middle) for value in values)


def _step(series: KernelTimes, low: int, at: int, high: int, since: int | None = None) -> float:
    """Return how far two levels are apart in logarithms, negative where the second is faster.

    Of an even number of runs the middle one counts that makes the step less, so that one of two
    alone makes none. Nor is there any where the own times did not move with the ratios to the peer:
    then the peer moved.

    Args:
        since: where the second level begins; None is `at`.
    """
    before, after = slice(low, at), slice(since or at, high if since is None else None)
    first, second = series.values[before], series.values[after]
    up = max(0.0, median_low(second) - median_high(first))
    step = up + min(0.0, median_high(second) - median_low(first))
    own = median(series.own[after]) - median(series.own[before])
    return step if step and own / step >= AGREE else 0.0


def table(found: Sequence[Change]) -> Table:
    """Return a line per change: at which run a level began, and after which."""
    head = ("device", "what", "since", "after", "before", "now", "×", "noise", "")
    rows = [
        (
            change.series.device,
            name_of(change.series.row),
            change.first.name,
            change.last.name,
            time_text(change.before),
            time_text(change.after),
            times(change.rise, 3),
            share(change.noise),
            change.verdict,
        )
        for change in found
    ]
    return Table(head, rows, left=(0, 1, 2, 3, 8))


def records(found: Sequence[Change]) -> list[dict[str, object]]:
    """Return the changes as records, for JSON and CSV."""
    return [
        {
            "device": change.series.device,
            "op": change.series.row.op,
            "kernel": change.series.row.label,
            "problem": change.series.row.problem,
            "data": change.series.row.data,
            "commit": change.first.commit or None,
            "file": str(change.first.file),
            "after_commit": change.last.commit or None,
            "after_file": str(change.last.file),
            "before_ms": change.before,
            "ms": change.after,
            "rise": change.rise,
            "noise": change.noise,
            "peer": change.series.peer,
            "verdict": change.verdict,
        }
        for change in found
    ]


def summary(
    runs: Sequence[MeasuredRun], every: Sequence[KernelTimes], found: Sequence[Change]
) -> str:
    """Return in a line how much was judged."""
    told = counts(runs, every, found)
    judged = f"{plural(told['runs'], 'run')}, {plural(told['pairs'], 'pair')} of kernel and problem"
    text = f"{judged}: {told['slower']} slower than before"
    if short := told["unjudged"]:
        text += f"; {short} with fewer than {2 * LEAST_RUNS} runs, which cannot be judged"
    return text


def counts(
    runs: Sequence[MeasuredRun], every: Sequence[KernelTimes], found: Sequence[Change]
) -> dict[str, int]:
    """Return how many runs and pairs of kernel and problem there are, and what of these is said."""
    return {
        "runs": len(runs),
        "pairs": len(every),
        "slower": sum(change.verdict == "slower" for change in found),
        "unjudged": sum(len(series.points) < 2 * LEAST_RUNS for series in every),
    }


def history(paths: Sequence[Path], fail_on: str | None, form: str, page: Path | None) -> None:
    """Show at which commits kernels changed their times.

    A file that cannot be read is left out, and the command fails in the end.

    Raises:
        UsageError: a file cannot be read, or nothing was measured.
        RegressionError: `fail_on` is given, and a slowdown by more stands.
    """
    least = None if fail_on is None else parse_share(fail_on)
    check_page(page)
    runs, damaged = read(paths)
    if not runs:
        raise damaged[0]
    every = series_of(ordered(runs))
    if not every:
        raise UsageError("no file has the time of a kernel")
    found = changes(every)
    said = summary(runs, every, found)
    document = {"schema": 1, **counts(runs, every, found), "changes": records(found)}
    output.give(
        form,
        document,
        lambda: _print(found, said),
        lambda: {said: table(found)},
        lambda: records(found),
    )
    if page is not None:
        from jetfire.report.history import render

        files.write(page, render(every, found, said))
    unread = ""
    if damaged:
        all_files = plural(len(runs) + len(damaged), "file")
        unread = f"{len(damaged)} of {all_files} cannot be read: {damaged[0]}"
    if least is not None:
        judge(found, least, unread)
    if unread:
        raise UsageError(unread)


def _print(found: Sequence[Change], said: str) -> None:
    console = terminal.console(width=160)
    console.print(said, soft_wrap=True, markup=False)
    if found:
        console.print(
            table(found).rich(folded=(0, 1), spare=("noise", "after", "device", "before"))
        )


def judge(found: Sequence[Change], least: float, unread: str = "") -> None:
    """Fail where a slowdown by more than a share stands.

    Args:
        unread: what is wrong with files, which is said besides.

    Raises:
        RegressionError: the message names the worst, and its commit.
    """
    slower = [c for c in found if c.verdict == "slower" and c.rise > 1 + least]
    if not slower:
        return
    if unread:
        note(unread)
    worst = slower[0]
    raise RegressionError(
        f"{len(slower)} slower by more than {100 * least:g}%: {name_of(worst.series.row)} takes "
        f"{worst.rise:.2f}× as long since {worst.first.name}, after {worst.last.name}"
    )
