"""The page of a history: each kernel's times run after run, and where their level changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jetfire.measure.results import problem_text
from jetfire.report import page
from jetfire.report.page import PageChart, blank, escaped
from jetfire.report.rows import grouped
from jetfire.report.table import Table
from jetfire.report.text import fixed, share, spread_text, time_text, times

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from jetfire.bench.history import Change, KernelTimes

TICK = 16  # characters of a run's name at an axis
MOST = 500  # series that a page holds: of 200 runs each they are 20 MB


def render(every: Sequence[KernelTimes], found: Sequence[Change], summary: str) -> str:
    """Return the page's HTML: those that changed first, in the order of the changes."""
    in_order = sorted(found, key=lambda change: change.at)
    changes = grouped(in_order, lambda change: id(change.series))
    changed = {id(change.series): change.series for change in found}
    shown = [*changed.values(), *(one for one in every if id(one) not in changed)][:MOST]
    left_out = len(every) - len(shown)
    return page.render(
        "history.html.j2",
        title="History of kernels' times",
        index=_index(shown, changes),
        caption=summary + (f"; {left_out} more are left out" if left_out else ""),
        sections=[
            _section(f"series-{i}", series, changes.get(id(series), []))
            for i, series in enumerate(shown)
        ],
    )


def _title(series: KernelTimes) -> str:
    return f"{series.row.op} · {series.row.label}"


def _index(shown: Sequence[KernelTimes], changes: dict[Any, list[Change]]) -> Table:
    head = ["op · kernel", "problem", "device", "runs", "last time", "changes"]
    rows = [
        (
            _title(series),
            problem_text(series.row.problem),
            series.device,
            str(len(series.points)),
            time_text(series.row.ms),
            "; ".join(_said(change) for change in changes.get(id(series), [])) or "none",
        )
        for series in shown
    ]
    return Table(head, rows)


def _said(change: Change) -> str:
    """Return ``slower since 0123abc: 1.102×, noise 0.8%``."""
    level = f"{times(change.rise, 3)}, noise {share(change.noise)}"
    return f"{change.verdict} since {change.first.name}: {level}"


def _section(identifier: str, series: KernelTimes, changes: Sequence[Change]) -> dict[str, Any]:
    beside = f"the ratio to {series.peer} in the same run" if series.peer else "no peer"
    peer = series.peer or ""
    head = ["run", "measured", "time", "p20–p80", f"× {peer or 'peer'}", "file"]
    rows = [
        (
            point.run.name,
            point.run.time,
            time_text(point.ms),
            spread_text(point.row),
            fixed((point.row.vs_peer or {}).get(peer), 3),
            str(point.run.file),
        )
        for point in series.points
    ]
    said = "; ".join(_said(change) for change in changes) or "no change beyond the noise"
    return {
        "id": identifier,
        "title": _title(series),
        "problem": f"{problem_text(series.row.problem)} · {series.device}",
        "chart": PageChart(
            f"{identifier}-plot",
            "times, run after run",
            f"{said}. Judged by the time and {beside}.",
            figure(series, changes),
        ),
        "runs": Table(head, rows),
        "changed": [change.at for change in changes],
    }


def figure(series: KernelTimes, changes: Sequence[Change]) -> go.Figure:
    """Return the times with their percentiles, run after run, and the levels before and after."""
    import plotly.graph_objects as go

    from jetfire.report.tuning_charts import BEST, FATES

    made, points = blank(360), series.points
    spans = [(p.row.ms_p20 or p.ms, p.row.ms_p80 or p.ms) for p in points]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [high - p.ms for p, (_, high) in zip(points, spans, strict=True)],
        "arrayminus": [p.ms - low for p, (low, _) in zip(points, spans, strict=True)],
    }
    made.add_scatter(
        x=list(range(len(points))),
        y=[point.ms for point in points],
        error_y=bars,
        mode="markers",
        name="median, p20–p80",
        marker={"color": FATES["ok"]},
        hovertext=[escaped(f"{p.run.name}: {time_text(p.ms)}, {p.run.file}") for p in points],
        hoverinfo="text",
    )
    ends = [*(change.at for change in changes), len(points)]
    for change, end in zip(changes, ends[1:], strict=True):
        colour = BEST if change.rise < 1 else FATES["wrong"]
        level = {"x": [change.at - 0.5, change.at - 0.5, end - 0.5], "mode": "lines"}
        ys = [change.before, change.after, change.after]
        name = escaped(f"{change.verdict} since {_tick(change.first.name)}")
        line = go.Scatter(y=ys, name=name, line={"color": colour}, **level)
        made.add_trace(line)
    stride = max(1, len(points) // 12)
    ticks = range(0, len(points), stride)
    names = [escaped(_tick(points[i].run.name)) for i in ticks]
    made.update_xaxes(tickvals=list(ticks), ticktext=names, tickangle=-90)
    made.update_yaxes(title="time per call (ms)", rangemode="tozero")
    return made


def _tick(name: str) -> str:
    """Return a run's name, of a long one the end, in which names differ."""
    return name if len(name) <= TICK else f"…{name[1 - TICK :]}"
