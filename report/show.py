"""Result rows for a reader: the terminal's table of an op's rows, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from jetfire.core import registry, terminal
from jetfire.measure.results import Row, problem_text, shape_text
from jetfire.report import counters
from jetfire.report.rows import fastest, grouped, varying
from jetfire.report.table import Table
from jetfire.report.text import (
    NOTHING,
    error_text,
    fixed,
    gib,
    rate_text,
    share,
    spread_text,
    time_text,
    times,
)

if TYPE_CHECKING:
    from rich.text import Text

    from jetfire.report.fitted import FittedTable

# The peer that a kernel's time is first compared with, after its op's own (`Op.baselines`): what
# training uses today.
BASELINES = ("cublas_bf16", "compile", "bf16_matmul", "fp32_matmul", "eager", "copy", "launch")
# What goes first where a terminal is narrow: kernel, time and error stay.
SPARE = (
    "p20–p80",
    "activations GiB",
    "peak GiB",
    "W",
    "MHz",
    "SQNR dB",
    "roofline",
    "× peer",
    "rate",
)


def first_ratio(ratios: dict[str, float] | None, own: Sequence[str] = ()) -> str:
    """Return ``1.25× peer`` of the first baseline, above 1 being faster; empty without any."""
    found = ratios or {}
    name = next((name for name in (*own, *BASELINES) if name in found), None)
    return "" if name is None else f"{times(found[name])} {name}"


def ratio_text(row: Row) -> str:
    """Return how the kernel stands to its first baseline."""
    own = registry.get(row.op).baselines if row.op in registry.names() else ()
    return first_ratio(row.vs_peer, own)


def by_op(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(same) for _, same in groupby(rows, key=lambda row: row.op)]


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest that does the op's work; a copy does not."""
    return fastest(row for row in rows if row.kernel != "copy")


def cells(row: Row) -> dict[str, str]:
    """Return one row's texts by column; empty where there is nothing to say."""
    texts = {
        "kernel": row.label,
        "time": time_text(row.ms),
        "p20–p80": spread_text(row),
        "rate": rate_text(row),
        "roofline": share(row.roofline),
        "× peer": ratio_text(row),
        "peak GiB": gib(row, "peak_gib"),
        "activations GiB": gib(row, "activation_gib"),
        "MHz": f"{fixed(row.sm_mhz)}{'!' if row.throttled else ''}",
        "W": fixed(row.watts),
        "SQNR dB": fixed(row.sqnr_db, 1),
        "error": "WRONG" if row.ok is False else _error(row),
    }
    always = ("time", "rate")
    return {
        name: "" if text == NOTHING and name not in always else text for name, text in texts.items()
    }


def _error(row: Row) -> str:
    text = error_text(row.rel_err)
    return f"{text}†" if "noise" in row.extra and text != NOTHING else text


def _shown(rows: Sequence[Row]) -> list[str]:
    """Return the columns that hold something in some row."""
    texts = [cells(row) for row in rows]
    return [name for name in texts[0] if any(text[name] for text in texts)]


def _titled(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each problem and kind of data, with what tells it from the others."""
    _, differing = varying(rows)
    several = len({row.data for row in rows}) > 1
    found = []
    for _, part in groupby(rows, key=lambda row: (row.op, problem_text(row.problem), row.data)):
        same = list(part)
        data = f" data={same[0].data}" if several else ""
        found.append((shape_text(same[0].problem, differing) + data, same))
    return found


def heading(title: str, rows: Sequence[Row]) -> Text:
    """Return what stands above one op's table: what all its rows share, and the device."""
    from rich.text import Text

    shared, _ = varying(rows)
    what = terminal.styled(f"{rows[0].op} {problem_text(shared)}", "bold")
    return Text.assemble(what, terminal.styled(f"\n{title}"))


def table(rows: Sequence[Row]) -> FittedTable:
    """Return one op's rows for the terminal, a section for each problem, the fastest marked."""
    shown = _shown(rows)
    made = Table(shown).rich(spare=SPARE)
    for text, members in _titled(rows):
        if text:  # one problem alone is named above the table
            made.add_section(text)
        first = best(members)
        for row in members:
            texts = cells(row)
            texts["kernel"] = f"{'★' if row is first else ' '} {texts['kernel']}"
            style = "bold" if row is first else ("red" if row.ok is False else "")
            made.add_row(*(texts[name] for name in shown), style=style)
    return made


def markdown(title: str, rows: Sequence[Row]) -> str:
    """Return one op's rows as Markdown."""
    shown = [name for name in _shown(rows) if name != "kernel"]
    lines = []
    for text, members in _titled(rows):
        first = best(members)
        for row in members:
            texts = cells(row)
            name = f"**{row.label}** ★" if row is first else row.label
            lines.append([text, name, *(texts[column] for column in shown)])
    tables = [Table(["problem", "kernel", *shown], lines, (0, 1)), *splits(rows)]
    tables += counters.tables(rows)
    said = [f"- {line}" for line in (*counters.sentences(rows), *footnotes(rows))]
    head = f"### {rows[0].op} {problem_text(varying(rows)[0])}".rstrip()
    parts = [f"{head}\n", f"{title}\n", *(table.markdown() for table in tables)]
    return "\n".join([*parts, *said, *([""] if said else [])])


def splits(rows: Sequence[Row]) -> list[Table]:
    """Return the times of stages: a table for each kernel, or mode, of an op that has stages.

    A column is a launch, under its shape; the last lines are the stages' sum and the whole launch.
    """
    staged = [row for row in rows if row.ms is not None and row.extra.get("stages")]
    found = grouped(staged, lambda row: (row.label, *row.extra["stages"]))
    return [_split(label, stages, same) for (label, *stages), same in found.items()]


def _split(label: str, stages: Sequence[str], rows: Sequence[Row]) -> Table:
    shared, differing = varying(rows)
    head = [" ".join([label, str(shared.get("mode", ""))]).strip()]
    head += [shape_text(row.problem, differing) for row in rows]
    sums = [sum(row.extra["stages"].values()) for row in rows]
    lines = []
    for name in stages:
        found = [row.extra["stages"][name] for row in rows]
        parts = zip(found, sums, strict=True)
        lines.append([name, *(f"{time_text(ms)} {share(ms / whole)}" for ms, whole in parts)])
    lines.append(["sum", *map(time_text, sums)])
    lines.append(["all in turn", *(time_text(row.ms) for row in rows)])
    return Table(head, lines)


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Return what a reader must know to read the table."""
    reasons = sorted({reason for row in rows for reason in row.throttled or ()})
    held = f"! the clock was held down while it ran: {', '.join(reasons)}"
    noises = [f"{share(row.extra['noise'])} ({row.label})" for row in rows if "noise" in row.extra]
    along = f"† of the part along BF16's gradient; the rest is noise, of {', '.join(noises)}"
    found = [row.extra["counters"] for row in counters.profiled(rows)]
    said = ([held] if reasons else []) + ([along] if noises else [])
    return [*said, *counters.footnotes(found)]
