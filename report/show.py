"""Rows for a reader: the terminal's table, Markdown, and short texts for numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jetfire.core import registry, terminal
from jetfire.measure.results import Row, problem_text, shape_text
from jetfire.report.table import MarkdownTable as Markdown

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# The peer that a kernel's time is first compared with, after its op's own (`Op.baselines`): what
# training uses today.
BASELINES = ("cublas_bf16", "compile", "bf16_matmul", "fp32_matmul", "eager", "copy",
             "launch")  # fmt: skip
FP16 = "cublas_fp16"  # of INT4 the paper's own (arXiv 2306.11987)
NO_GPU = "this is the CPU: no figure here says anything about a GPU"


def time_text(ms: float | None) -> str:
    if ms is None:
        return "–"
    return f"{_three(ms * 1e3)} µs" if ms < 1 else f"{_three(ms)} ms"


def spread_text(row: Row) -> str:
    """The 20th and the 80th percentile, in the unit of the time."""
    if row.ms is None or row.ms_p20 is None or row.ms_p80 is None:
        return ""
    unit = 1e3 if row.ms < 1 else 1
    return f"{row.ms_p20 * unit:.4g}–{row.ms_p80 * unit:.4g}"


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _three(value: float) -> str:
    """Three digits, no exponent: from run to run the third differs."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate_text(row: Row) -> str:
    if row.tflops is not None:
        tera = row.tflops >= 1
        return f"{_three(row.tflops)} TFLOP/s" if tera else f"{_three(row.tflops * 1e3)} GFLOP/s"
    return "–" if row.gbps is None else f"{_three(row.gbps)} GB/s"


def share_text(share: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.0%}" if share >= 0.095 else f"{share:.1%}"


def ratio_text(row: Row) -> str:
    """The kernel against its first baseline: above 1 it is faster."""
    ratios = row.vs_peer or {}
    own = registry.get(row.op).baselines if row.op in registry.names() else ()
    order = (*own, *BASELINES)
    name = next((n for n in order if n in ratios), None)
    return "" if name is None else f"{ratios[name]:.2f}× {name}"


def error_text(row: Row) -> str:
    if row.ok is False:
        return "WRONG"
    return "" if row.rel_err is None else ("exact" if row.rel_err == 0 else f"{row.rel_err:.1e}")


def data_text(data: str | None) -> str:
    """``outlier × normal``: the operands' distributions, or the one of both."""
    return (data or "any").replace("/", " × ")


def varying(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """(problem fields that all rows share, names of those that differ); sizes are in neither."""
    names = list(dict.fromkeys(name for row in rows for name in row.problem))
    shared: dict[str, Any] = {}
    differing = []
    for name in names:
        if name in ("m", "n", "k"):
            continue
        values = {str(row.problem.get(name)) for row in rows}
        if len(values) == 1:
            shared[name] = rows[0].problem.get(name)
        else:
            differing.append(name)
    return shared, differing


def groups(rows: Iterable[Row]) -> list[tuple[str, dict[str, Any], list[Row]]]:
    """(op, problem, rows) in the order of the rows, those of one kind of data together."""
    found = []
    for _, part in groupby(rows, key=lambda row: (row.op, problem_text(row.problem), row.data)):
        same = list(part)
        found.append((same[0].op, same[0].problem, same))
    return found


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest that does the op's work; a copy does not."""
    timed = [row for row in rows if row.ms is not None and row.kernel != "copy"]
    return min(timed, key=lambda row: row.ms or 0.0, default=None)


HEADERS = ("kernel", "time", "p20–p80", "rate", "roofline", "× peer", "peak GiB", "activations GiB",
           "MHz", "W", "SQNR dB", "error")  # fmt: skip


def cells(row: Row) -> list[str]:
    """One row's texts, under `HEADERS`."""
    throttled = "!" if row.throttled else ""
    return [
        row.label,
        time_text(row.ms),
        spread_text(row),
        rate_text(row),
        share_text(row.roofline),
        ratio_text(row),
        _gib(row, "peak_gib"),
        _gib(row, "activation_gib"),
        "" if row.sm_mhz is None else f"{row.sm_mhz:.0f}{throttled}",
        number(row.watts) if row.watts is not None else "",
        number(row.sqnr_db, 1) if row.sqnr_db is not None else "",
        error_text(row),
    ]


def _gib(row: Row, name: str) -> str:
    value = row.extra.get(name)
    return "" if value is None else number(value, 2)


def _shown(rows: Sequence[Row], narrow: bool = False) -> list[int]:
    """Columns that hold something in some row; a narrow table leaves out the percentiles."""
    texts = [cells(row) for row in rows]
    left_out = {2} if narrow else set()
    return [
        i
        for i in range(len(HEADERS))
        if i not in left_out and (i == 0 or any(text[i] for text in texts))
    ]


def _titled(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Each group with what tells it from the others."""
    _, differing = varying(rows)
    several = len({row.data for row in rows}) > 1
    return [
        (shape_text(problem, differing) + (f" data={members[0].data}" if several else ""), members)
        for _, problem, members in groups(rows)
    ]


def heading(title: str, rows: Sequence[Row]) -> Text:
    """What stands above one op's table: what all its rows share, and the device."""
    from rich.text import Text

    shared, _ = varying(rows)
    what = terminal.styled(f"{rows[0].op} {problem_text(shared)}", "bold")
    return Text.assemble(what, terminal.styled(f"\n{title}"))


def table(rows: Sequence[Row], narrow: bool = False) -> Table:
    """A Rich table of one op's rows, a section for each problem, the fastest marked."""
    from rich import box
    from rich.table import Table

    shown = _shown(rows, narrow)
    made = Table(box=box.SIMPLE_HEAD)
    for i in shown:
        made.add_column(HEADERS[i], justify="left" if i == 0 else "right", no_wrap=True)
    for text, members in _titled(rows):
        made.add_section()
        made.add_row(terminal.styled(text, "cyan"))
        fastest = best(members)
        for row in members:
            texts = cells(row)
            texts[0] = ("★ " if row is fastest else "  ") + texts[0]
            style = "bold" if row is fastest else ("red" if row.ok is False else "")
            made.add_row(*(texts[i] for i in shown), style=style)
    return made


@dataclass(frozen=True)
class Split:
    """The times of the stages of some launches: texts, a column for each launch.

    Attributes:
        head: the launches' shapes, after what the stages are of.
        lines: a stage's name and times; then their sum, and the whole launch.
    """

    head: Sequence[str]
    lines: Sequence[Sequence[str]]


def splits(rows: Sequence[Row]) -> list[Split]:
    """One for each kernel, or mode, of one op that has stages of its own, in the rows' order."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.ms is not None and (stages := row.extra.get("stages")):
            found.setdefault((row.label, *stages), []).append(row)
    return [_split(label, stages, same) for (label, *stages), same in found.items()]


def _split(label: str, stages: Sequence[str], rows: Sequence[Row]) -> Split:
    shared, differing = varying(rows)
    head = [" ".join([label, str(shared.get("mode", ""))]).strip()]
    head += [shape_text(row.problem, differing) for row in rows]
    sums = [sum(row.extra["stages"].values()) for row in rows]
    lines = []
    for name in stages:
        times = [row.extra["stages"][name] for row in rows]
        texts = [f"{time_text(ms)} {share_text(ms / all_)}"
                 for ms, all_ in zip(times, sums, strict=True)]  # fmt: skip
        lines.append([name, *texts])
    lines.append(["sum", *(time_text(ms) for ms in sums)])
    lines.append(["all in turn", *(time_text(row.ms) for row in rows)])
    return Split(head, lines)


def split_tables(rows: Sequence[Row]) -> list[Table]:
    """Rich tables of the rows' `splits`."""
    from rich import box
    from rich.table import Table

    made = []
    for split in splits(rows):
        table = Table(box=box.SIMPLE_HEAD)
        for i, text in enumerate(split.head):
            table.add_column(text, justify="right" if i else "left", no_wrap=True)
        for line in split.lines:
            table.add_row(*line)
        made.append(table)
    return made


def by_op(rows: Sequence[Row]) -> list[list[Row]]:
    return [list(same) for _, same in groupby(rows, key=lambda row: row.op)]


def markdown(title: str, rows: Sequence[Row]) -> str:
    """A Markdown table of one op's rows."""
    shown = [i for i in _shown(rows) if i > 0]
    shared, _ = varying(rows)
    lines = [f"### {rows[0].op} {problem_text(shared)}".rstrip(), "", title, ""]
    lines.append("| problem | kernel | " + " | ".join(HEADERS[i] for i in shown) + " |")
    lines.append("|---|---|" + "---:|" * len(shown))
    for text, members in _titled(rows):
        fastest = best(members)
        for row in members:
            texts = cells(row)
            name = f"**{row.label}** ★" if row is fastest else row.label
            values = " | ".join(texts[i] for i in shown)
            lines.append(f"| {text} | {name} | {values} |")
    for split in splits(rows):
        lines += ["", Markdown("", "", split.head, split.lines).markdown().rstrip()]
    return "\n".join([*lines, ""])


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know to read the table."""
    reasons = sorted({reason for row in rows for reason in row.throttled or ()})
    return [f"! the clock was held down while it ran: {', '.join(reasons)}"] if reasons else []
