"""The report's figures: Plotly, drawn with SVG alone so that they print and need no WebGL."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from jetfire.report import counters
from jetfire.report.page import COLOURS, GRID, blank, escaped
from jetfire.report.text import fields_text, significant

if TYPE_CHECKING:
    from jetfire.tuner.saved_study import Attempt, SavedStudy

# By a trial's fate, in the order in which they are shown: Okabe and Ito's palette where it can be
# told from white and from black alike.
FATES = {
    "ok": "#3b8fd1",
    "slow": "#e69f00",
    "illegal": "#999999",
    "compile": "#cc79a7",
    "timeout": "#a67c00",
    "crash": "#d55e00",
    "wrong": "#e0245e",
    "lost": "#777777",
    "running": "#777777",
}
BEST, DEFAULT, ROOF = "#009e73", "#b455c8", "#888888"
FAST, SLOW = (31, 119, 208), (217, 119, 43)
COST = {"ms": "time per call (ms)", "J": "energy per call (J)"}
SHADES = 16
Ticks = tuple[list[float], list[str]]
Of = Callable[["Attempt"], Any]  # a coordinate of a trial's point


def log_ticks(low: float, high: float) -> Ticks:
    """Return round values between two bounds on a log axis, three at least where there are."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for mantissas in (
        (1.0,),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 7),
        [m / 10 for m in range(10, 100)],
        [m / 100 for m in range(100, 1000)],
    ):
        found = [float(f"{m}e{d}") for d in decades for m in mantissas]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    found = found[:: math.ceil(len(found) / 8) or 1]
    return found, [f"{value:.6g}" for value in found]


def _log_axis(title: str, values: Sequence[float], pad: float = 0.08) -> dict[str, Any]:
    """A log axis around values, with its own ticks: Plotly labels a narrow one by last digits."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max((high - low) * pad, 0.02)
    ticks, texts = log_ticks(10 ** (low - margin), 10 ** (high + margin))
    return {
        "title": {"text": title},
        "type": "log",
        "range": [low - margin, high + margin],
        "tickvals": ticks,
        "ticktext": texts,
    }


def _hover(attempt: Attempt, *more: str) -> str:
    lines = [f"trial {attempt.number}: {attempt.fate}"]
    if attempt.ms is not None:
        lines.append(f"{significant(attempt.ms, 4)} ms")
    if attempt.joules is not None:
        lines.append(f"{significant(attempt.joules, 4)} J")
    lines += [*more, *textwrap.wrap(fields_text(attempt.config), 72)]
    lines += textwrap.wrap(attempt.message[:500], 72)[:6]
    return "<br>".join(map(escaped, lines))


def _points(name: str, attempts: Sequence[Attempt], x: Of, y: Of, **marker: Any) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="markers",
        x=[x(a) for a in attempts],
        y=[y(a) for a in attempts],
        hovertext=[_hover(a) for a in attempts],
        hoverinfo="text",
        marker={"size": 7, **marker},
    )


def _line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, **line: str
) -> go.Scatter:
    """Draw a line, whose name stands under the pointer unless it is a staircase."""
    hover = "skip" if "shape" in line else "name"
    style = {"color": colour, "width": 2, **line}
    return go.Scatter(name=name, mode="lines", x=x, y=y, hoverinfo=hover, line=style)


def _marked(study: SavedStudy, among: Sequence[Attempt], x: Of, y: Of) -> list[go.Scatter]:
    """Draw the default and the best, where drawn, as large symbols on top."""
    edge = {"width": 1.5, "color": "#ffffff"}
    marks = (
        ("default", study.default, {"size": 13, "symbol": "diamond", "color": DEFAULT}),
        ("best", study.best, {"size": 17, "symbol": "star", "color": BEST}),
    )
    return [
        _points(name, [attempt], x, y, line=edge, **style)
        for name, attempt, style in marks
        if attempt is not None and attempt in among
    ]


def _by_fate(attempts: Sequence[Attempt], x: Of, y: Of) -> list[go.Scatter]:
    """Draw measured trials, a trace per outcome; what was measured briefly is hollow."""
    groups = {fate: [a for a in attempts if a.fate == fate] for fate in FATES}
    symbols = {"slow": "circle-open"}
    return [
        _points(fate, group, x, y, color=FATES[fate], symbol=symbols.get(fate, "circle"))
        for fate, group in groups.items()
        if group
    ]


def _cost(attempt: Attempt) -> float:
    """Return what a measured trial's first objective was: ms or J."""
    assert attempt.values is not None
    return attempt.values[0]


def _level(study: SavedStudy, name: str) -> tuple[float, str] | None:
    """Return the default's or the best's cost and its source: the final comparison first."""
    fields = {"best": study.units[0].replace("J", "joules"), "default": "default_ms"}
    if study.final is not None and (name == "best" or study.units[0] == "ms"):
        value = study.final.get(fields[name])
        if value:  # a counter of energy may not have moved
            return value, "final comparison"
    attempt = study.default if name == "default" else study.best
    return (_cost(attempt), f"trial {attempt.number}") if attempt else None


def history(study: SavedStudy) -> go.Figure | None:
    """Draw each trial's cost by number, the best so far, and above them those that failed."""
    failed = [a for a in study.attempts if a.values is None or a.ms is None]
    if not study.attempts:
        return None
    rows = [fate for fate in FATES if any(a.fate == fate for a in failed)]
    strip = min(0.05 + 0.06 * len(rows), 0.45) if rows else 0.0
    if not study.measured:
        strip = 1.0
    figure = blank(400 if study.measured else 120 + 30 * len(rows))
    for fate in rows:
        group = [a for a in failed if a.fate == fate]
        points = _points(
            fate, group, lambda a: a.number, lambda a: a.fate, symbol="x", color=FATES[fate]
        )
        figure.add_trace(points.update(yaxis="y2", showlegend=False))
    last = study.attempts[-1].number
    figure.update_xaxes(title_text="trial", range=[-0.7, last + 0.7], anchor="free", position=0)
    if last < 10:  # Plotly would put ticks between the trials
        figure.update_xaxes(dtick=1)
    if rows:
        figure.update_layout(
            yaxis2={
                "domain": [1 - strip + 0.02 * bool(study.measured), 1],
                "type": "category",
                "categoryorder": "array",
                "categoryarray": rows[::-1],
                "gridcolor": GRID,
                "automargin": True,
                "range": [-0.6, len(rows) - 0.4],
                "fixedrange": True,
            }
        )
    if study.measured:
        _measured_history(figure, study, last, 1 - strip)
    else:
        figure.update_layout(yaxis={"visible": False})
    return figure


def _measured_history(figure: go.Figure, study: SavedStudy, last: int, top: float) -> None:
    figure.add_traces(_by_fate(study.measured, lambda a: a.number, _cost))
    costs = [_cost(a) for a in study.measured]
    if study.ok:
        lowest = list(accumulate(map(_cost, study.ok), min))
        numbers = [*(a.number for a in study.ok), last + 0.5]
        figure.add_trace(_line("best so far", numbers, [*lowest, lowest[-1]], BEST, shape="hv"))
    for name, colour in (("default", DEFAULT), ("best", BEST)):
        level = _level(study, name)
        if level is not None:
            value, where = level
            costs.append(value)
            text = f"{name} {significant(value, 4)} {study.units[0]} ({where})"
            dash = "dash" if name == "default" else "dot"
            figure.add_trace(_line(text, [-0.5, last + 0.5], [value, value], colour, dash=dash))
    marks = _marked(study, study.ok, lambda a: a.number, _cost)
    figure.add_traces([mark.update(showlegend=False) for mark in marks])
    axis = _log_axis(COST[study.units[0]], costs)
    figure.update_layout(yaxis={**axis, "domain": [0, top], "gridcolor": GRID})


def importance(study: SavedStudy) -> go.Figure | None:
    """Draw a bar per parameter, longest on top; with two objectives two bars."""
    found = {unit: shares for unit, shares in study.importances.items() if shares}
    if not found:
        return None
    order = list(next(iter(found.values())))[::-1]
    figure = blank(110 + 28 * len(order) * len(found), barmode="group")
    for unit, shares in found.items():
        values = [shares.get(name, 0.0) for name in order]
        figure.add_trace(
            go.Bar(
                name="time" if unit == "ms" else "energy",
                orientation="h",
                y=list(map(escaped, order)),
                x=values,
                text=[f"{value:.0%}" for value in values],
                textposition="outside",
                cliponaxis=False,
                hoverinfo="skip",
                showlegend=len(found) > 1,
                marker={"color": FATES["ok"] if unit == "ms" else FATES["slow"]},
            )
        )
    figure.update_xaxes(title_text="share of the importance", tickformat=".0%", range=[0, 1.08])
    figure.update_yaxes(title_text="parameter", type="category")
    return figure


def _shade(share: float) -> str:
    """Return a colour from the fastest's blue (0) to the slowest's orange (1), by way of grey."""
    middle = (150, 150, 150)
    ends = (FAST, middle) if share < 0.5 else (middle, SLOW)
    part = share * 2 if share < 0.5 else share * 2 - 1
    mixed = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


def _places(study: SavedStudy, ranked: Sequence[Attempt]) -> dict[int, list[float]]:
    """Return trial number → its height on each field's axis, in [0, 1].

    Every value has a band; within it the trials stand by cost, the best lowest, so that a band's
    colours show how its value does.
    """
    places: dict[int, list[float]] = {a.number: [] for a in ranked}
    for axis, (name, values) in enumerate(study.fields.items()):
        for row, value in enumerate(values):
            band = [a for a in ranked if a.has(name, value)]
            for i, attempt in enumerate(band):
                inside = 0.15 + 0.7 * (i + 0.5) / len(band)
                places[attempt.number].append((row + inside) / len(values))
        for heights in places.values():  # a config without the field passes below the axis
            heights += [-0.05] * (axis + 1 - len(heights))
    return places


def parallel(study: SavedStudy) -> go.Figure | None:
    """Draw a line per measured trial through its config's fields to its cost."""
    ranked = sorted(study.measured, key=lambda a: (_cost(a), a.number))
    if not ranked or not study.fields:
        return None
    low, high = math.log10(_cost(ranked[0])), math.log10(_cost(ranked[-1]))
    share = {a.number: (math.log10(_cost(a)) - low) / ((high - low) or 1.0) for a in ranked}
    places = _places(study, ranked)
    figure = blank(460)
    for shade in reversed(range(SHADES)):
        group = [a for a in ranked if min(int(share[a.number] * SHADES), SHADES - 1) == shade]
        if group:
            middle = shade / (SHADES - 1)
            line = {"color": _shade(middle), "width": 1.2 + 0.6 * (1 - middle)}
            figure.add_trace(
                _lines("trials", group, places, share, line, opacity=0.6, showlegend=False)
            )
    for name, attempt, colour, dash in (
        ("default", study.default, DEFAULT, "dash"),
        ("best", study.best, BEST, "solid"),
    ):
        if attempt is not None:
            line = {"color": colour, "width": 4, "dash": dash}
            figure.add_trace(_lines(name, [attempt], places, share, line))
    _parallel_axes(figure, study, 10**low, 10**high)
    return figure


def parallel_width(study: SavedStudy) -> int:
    """Return the pixels at which no name below an axis of `parallel` meets the next."""
    names = [*study.fields, COST[study.units[0]]]
    apart = max((len(a) + len(b) for a, b in pairwise(names)), default=0) * 3.4 + 6
    return round(72 + apart * (len(names) - 0.3))


def _lines(
    name: str,
    group: Sequence[Attempt],
    places: Mapping[int, Sequence[float]],
    share: Mapping[int, float],
    line: Mapping[str, Any],
    **more: Any,
) -> go.Scatter:
    """Draw one trace of many lines, with a gap after each."""
    x: list[float | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    for attempt in group:
        heights = [*places[attempt.number], share[attempt.number]]
        x += [*range(len(heights)), None]
        y += [*heights, None]
        texts += [*[_hover(attempt)] * len(heights), ""]
    return go.Scatter(
        name=name,
        mode="lines+markers" if more == {} else "lines",
        x=x,
        y=y,
        hovertext=texts,
        hoverinfo="text",
        line=line,
        connectgaps=False,
        **more,
    )


def _parallel_axes(figure: go.Figure, study: SavedStudy, low: float, high: float) -> None:
    """Draw a vertical per field with its values' names; the cost's own is at the right."""
    names = [*study.fields, COST[study.units[0]]]

    def label(x: int, y: float, text: str, anchor: str, shift: int) -> dict[str, Any]:
        at = {"x": x, "y": y, "xref": "x", "yref": "y", "xanchor": anchor, "xshift": shift}
        return {**at, "text": text, "showarrow": False}

    texts = [
        label(i, (row + 0.5) / len(values), escaped(value), "right", -6)
        for i, values in enumerate(study.fields.values())
        for row, value in enumerate(values)
    ]
    span = math.log10(high / low) or 1.0
    for value, text in zip(*log_ticks(low, high), strict=True):
        texts.append(label(len(names) - 1, math.log10(value / low) / span, text, "left", 6))
    line = {"type": "line", "layer": "below", "line": {"color": ROOF, "width": 1}}
    verticals = [{**line, "x0": i, "x1": i, "y0": 0, "y1": 1} for i in range(len(names))]
    figure.update_layout(annotations=texts, shapes=verticals, margin={"l": 24, "r": 48})
    figure.update_xaxes(
        tickvals=list(range(len(names))),
        ticktext=list(map(escaped, names)),
        range=[-0.3, len(names) - 0.6],
        showgrid=False,
    )
    figure.update_yaxes(range=[-0.08, 1.06], visible=False)


def roofline(study: SavedStudy) -> go.Figure | None:
    """Draw the attained rate under measured peaks: TOPS by intensity; GB/s if memory-bound."""
    flops, nbytes = study.get("flops"), study.get("bytes")
    if not study.measured or not nbytes:
        return None
    if not flops:
        return _bandwidth(study, nbytes)
    peaks = study.get("peaks") or {}
    copy, tops = peaks.get("copy_gbps"), peaks.get("int8_tops")
    intensity = flops / nbytes
    ridge = tops * 1e3 / copy if copy and tops else intensity
    left, right = min(intensity, ridge) / 8, max(intensity, ridge) * 8

    def rate(attempt: Attempt) -> float:
        return flops / (attempt.ms or math.inf) / 1e9

    figure = blank(420)
    ceilings = _roofs(copy, tops, left, ridge, right)
    figure.add_traces(ceilings)
    figure.add_traces(_by_fate(study.measured, lambda a: intensity, rate))
    figure.add_traces(_marked(study, study.ok, lambda a: intensity, rate))
    heights = [y for trace in ceilings for y in trace.y] + [rate(a) for a in study.measured]
    figure.update_layout(
        xaxis=_log_axis("arithmetic intensity (operations per byte)", [left, right], 0.0),
        yaxis=_log_axis("attained rate (TOPS)", heights),
    )
    return figure


def _roofs(
    copy: float | None, tops: float | None, left: float, ridge: float, right: float
) -> list[go.Scatter]:
    """Draw the slope of the copy bandwidth and the level of the INT8 peak where each binds."""
    found = []
    if copy:
        ends = [left, ridge if tops else right]
        found.append((f"copy {significant(copy, 4)} GB/s", ends, [x * copy / 1e3 for x in ends]))
    if tops:
        start = ridge if copy else left
        found.append((f"INT8 peak {significant(tops, 4)} TOPS", [start, right], [tops, tops]))
    dashes = ("solid", "longdash")
    return [_line(*roof, ROOF, dash=dash) for roof, dash in zip(found, dashes, strict=False)]


def _bandwidth(study: SavedStudy, nbytes: float) -> go.Figure:
    """Draw the trials' GB/s in a strip beside the copy's; the height only parts them."""
    copy = (study.get("peaks") or {}).get("copy_gbps")

    def rate(attempt: Attempt) -> float:
        return nbytes / (attempt.ms or math.inf) / 1e6

    def height(attempt: Attempt) -> float:
        return attempt.number * 0.618034 % 1  # the golden ratio spreads any run of numbers

    figure = blank(240)
    figure.add_traces(_by_fate(study.measured, rate, height))
    figure.add_traces(_marked(study, study.ok, rate, height))
    if copy:
        name = f"copy {significant(copy, 4)} GB/s"
        figure.add_trace(_line(name, [copy, copy], [-0.2, 1.2], ROOF))
    highest = max([*(rate(a) for a in study.measured), copy or 0.0])
    figure.update_xaxes(title_text="attained bandwidth (GB/s)", range=[0, highest * 1.06])
    figure.update_yaxes(visible=False, range=[-0.2, 1.2])
    return figure


def front(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return those that no other beats in both time and energy, fastest first."""
    found: list[Attempt] = []
    for attempt in sorted(attempts, key=lambda a: (a.ms or 0.0, a.joules or 0.0, a.number)):
        if not found or (attempt.joules or 0.0) < (found[-1].joules or 0.0):
            found.append(attempt)
    return found


def pareto(study: SavedStudy) -> go.Figure | None:
    """Draw energy over time, with the trials that nothing beats in both."""
    both = [a for a in study.measured if a.joules]
    if not both:
        return None
    ms, joules = attrgetter("ms"), attrgetter("joules")
    figure = blank(420)
    figure.add_traces(_by_fate(both, ms, joules))
    edge = front([a for a in both if a.fate == "ok"])
    x, y = list(map(ms, edge)), list(map(joules, edge))
    figure.add_trace(_line("Pareto front", x, y, BEST, shape="hv"))
    figure.add_traces(_marked(study, both, ms, joules))
    figure.update_layout(
        xaxis=_log_axis(COST["ms"], [ms(a) for a in both]),
        yaxis=_log_axis(COST["J"], [joules(a) for a in both]),
    )
    return figure


def stalls(study: SavedStudy) -> go.Figure | None:
    """Draw what warps wait for: stacked bars, one for the winner and one for the default."""
    bars = {name: counters.stalls(found) for name, found in study.counted.items()}
    reasons = dict.fromkeys(reason for found in bars.values() for reason in found)
    if not reasons:
        return None
    names = list(bars)[::-1]
    figure = blank(190 + 40 * len(names), barmode="stack")
    for i, reason in enumerate(reasons):
        values = [bars[name].get(reason, 0.0) for name in names]
        text = escaped(counters.reason_text(reason))
        shape = ("", "/", "x")[i // len(COLOURS) % 3]
        figure.add_trace(
            go.Bar(
                name=escaped(reason),
                orientation="h",
                y=names,
                x=values,
                hovertext=[f"{text}: {significant(value)}" for value in values],
                hoverinfo="text",
                marker={"color": COLOURS[i % len(COLOURS)], "pattern": {"shape": shape}},
            )
        )
    figure.update_xaxes(title_text="warps that wait, per issued instruction", rangemode="tozero")
    figure.update_yaxes(type="category")
    return figure
