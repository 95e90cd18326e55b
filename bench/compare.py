"""`jetfire compare`: two results files, row by row, and whether the second is slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jetfire import terminal
from jetfire.bench import show
from jetfire.bench.results import Results, Row
from jetfire.ops.errors import RegressionError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["faster", "slower", "noise", "broken"]


@dataclass(frozen=True)
class Pair:
    """The same thing measured before and after."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float | None:
        """Time after over time before: above 1 is slower."""
        if self.before.ms is None or self.after.ms is None:
            return None
        return self.after.ms / self.before.ms

    @property
    def verdict(self) -> Verdict:
        """Noise where the two spans between 20th and 80th percentile overlap."""
        if self.ratio is None:
            return "broken" if self.before.ms is not None else "faster"
        before = (self.before.ms_p20 or self.before.ms, self.before.ms_p80 or self.before.ms)
        after = (self.after.ms_p20 or self.after.ms, self.after.ms_p80 or self.after.ms)
        if before[0] <= after[1] and after[0] <= before[1]:  # type: ignore[operator]
            return "noise"
        return "slower" if self.ratio > 1 else "faster"

    def regressed(self, by: float) -> bool:
        """Slower by more than the given share and beyond noise, or no longer right."""
        if self.verdict == "broken":
            return True
        return self.verdict == "slower" and self.ratio is not None and self.ratio > 1 + by


def parse_share(text: str) -> float:
    """``5%`` or ``0.05``.

    Raises:
        UsageError: it is neither.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 10:
        raise UsageError(f"--fail-on-regression {text}: expected a share such as 5% or 0.05")
    return share


def match(before: Results, after: Results, config: bool = True) -> tuple[list[Pair], list[Row]]:
    """Rows of both files that measure the same thing, and those found in one alone.

    Raises:
        UsageError: without configs, a file measures one thing twice.
    """
    sides = []
    for results in (before, after):
        by_key: dict[str, Row] = {}
        for row in results.rows:
            if row.key(config) in by_key:
                raise UsageError(
                    f"{row.op} {row.kernel} {show.problem_text(row.problem)} is there twice: "
                    "compare with configs"
                )
            by_key[row.key(config)] = row
        sides.append(by_key)
    old, new = sides
    pairs = [Pair(row, new[key]) for key, row in old.items() if key in new]
    alone = [row for key, row in old.items() if key not in new]
    alone += [row for key, row in new.items() if key not in old]
    return pairs, alone


def table(pairs: Sequence[Pair]) -> Table:
    """The pairs of one op, the worst first."""
    from rich import box
    from rich.table import Table

    rows = [pair.after for pair in pairs]
    _, differing = show.varying(rows)
    made = Table(box=box.SIMPLE_HEAD)
    for name in ("problem", "kernel", "before", "p20–p80", "after", "p20–p80", "ratio", ""):
        made.add_column(
            name, justify="left" if name in ("problem", "kernel", "") else "right", no_wrap=True
        )
    styles = {"slower": "red", "broken": "red", "faster": "green", "noise": "dim"}
    for pair in sorted(pairs, key=lambda pair: -(pair.ratio or float("inf"))):
        made.add_row(
            show.shape_text(pair.after.problem, differing),
            pair.after.kernel,
            show.time_text(pair.before.ms),
            show.spread_text(pair.before),
            show.time_text(pair.after.ms),
            show.spread_text(pair.after),
            "–" if pair.ratio is None else f"{pair.ratio:.3f}",
            pair.verdict,
            style=styles[pair.verdict],
        )
    return made


def compare(a: Path, b: Path, fail_on: str | None, config: bool = True) -> None:
    """Show how B stands to A.

    Raises:
        UsageError: a file cannot be read, or nothing in them matches.
        RegressionError: `fail_on` is given and a kernel's row is slower by more than that, beyond
            noise, or has gone wrong; peers only show.
    """
    share = None if fail_on is None else parse_share(fail_on)
    before, after = Results.load(a), Results.load(b)
    pairs, alone = match(before, after, config)
    if not pairs:
        raise UsageError(f"{a} and {b}: no row of one measures what a row of the other does")
    console = terminal.console(width=160)
    names = [str(r.device.get("name")) for r in (before, after)]
    title = f"{a} → {b} on {' → '.join(dict.fromkeys(names))}; ratio above 1 is slower"
    for op in dict.fromkeys(pair.after.op for pair in pairs):
        part = [pair for pair in pairs if pair.after.op == op]
        console.print(show.heading(title, [pair.after for pair in part]), soft_wrap=True)
        console.print(table(part))
    if alone:
        console.print(f"{len(alone)} rows are in one file alone")
    if share is None:
        return
    if not any(pair.after.role == "kernel" for pair in pairs):
        raise UsageError(f"{a} and {b}: no kernel's row of one is in the other: nothing to judge")
    worse = [pair for pair in pairs if pair.after.role == "kernel" and pair.regressed(share)]
    if worse:
        worst = max(worse, key=lambda pair: pair.ratio or float("inf"))
        by = "is broken" if worst.ratio is None else f"takes {worst.ratio:.2f}× as long"
        raise RegressionError(
            f"{len(worse)} of {len(pairs)} rows regressed by more than {share:.1%}: "
            f"{worst.after.op} {worst.after.kernel} "
            f"{show.problem_text(worst.after.problem)} {by}"
        )
