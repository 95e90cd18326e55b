"""Charts of rows: time and rate against size for each kernel and peer, and the roofline."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jetfire.measure.results import Row, problem_text, shape_text
from jetfire.report.chart import (
    KERNEL_COLOURS,
    MARKERS,
    PEER_COLOURS,
    SMALL,
    canvas,
    legend,
    legend_height,
    note,
    plain,
    readable,
    save,
    verbatim,
)
from jetfire.report.rows import grouped, varying
from jetfire.report.show import by_op
from jetfire.report.text import data_text, significant, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

DIMS = ("m", "n", "k")


@dataclass(frozen=True)
class Series:
    """The points of one kernel (at one block, rounding, …), or of one peer."""

    label: str
    role: str
    rows: tuple[Row, ...]


def series_of(rows: Sequence[Row]) -> list[Series]:
    """Return one op's rows as series: kernels by every field that varies, peers by name."""
    timed = [row for row in rows if row.ms is not None]
    differing = varying(timed)[1] if timed else []

    def name(row: Row) -> tuple[str, str]:
        named = [n for n in differing if n in row.problem] if row.role == "kernel" else []
        return row.role, ", ".join([row.kernel, *(f"{n} {row.problem[n]}" for n in named)])

    ordered = sorted(grouped(timed, name).items(), key=lambda item: item[0][0] != "kernel")
    return [Series(label, role, tuple(members)) for (role, label), members in ordered]


@dataclass(frozen=True)
class Axis:
    """A shape's place on the x axis: at a size, or at its place in a list of shapes."""

    label: str
    position: Mapping[tuple[int, ...], float]
    ticks: Mapping[float, str]
    numeric: bool


def shape_of(row: Row) -> tuple[int, ...]:
    return tuple(row.problem[dim] for dim in DIMS if dim in row.problem)


def axis_of(rows: Sequence[Row]) -> Axis:
    """Return a size axis where one dimension, or all at once, tells shapes apart; else a list."""
    shapes = sorted({shape_of(row) for row in rows})
    dims = [dim for dim in DIMS if dim in rows[0].problem]
    moving = [i for i in range(len(dims)) if len({shape[i] for shape in shapes}) > 1]
    together = all(len({shape[i] for i in moving}) == 1 for shape in shapes if moving)
    if len(shapes) > 1 and together:
        fixed = [f"{dims[i]} = {shapes[0][i]}" for i in range(len(dims)) if i not in moving]
        label = " = ".join(dims[i] for i in moving) + (f"   ({', '.join(fixed)})" if fixed else "")
        position = {shape: float(shape[moving[0]]) for shape in shapes}
        return Axis(label, position, {x: f"{x:.0f}" for x in position.values()}, True)
    position = {shape: float(i) for i, shape in enumerate(shapes)}
    texts = {position[shape]: "×".join(map(str, shape)) for shape in shapes}
    return Axis("×".join(dims), position, texts, False)


KERNELS: dict[str, Any] = {"markersize": 6, "linewidth": 2, "zorder": 3}
PEERS: dict[str, Any] = {
    "linestyle": "--",
    "markersize": 4,
    "markerfacecolor": "white",
    "linewidth": 1.2,
    "zorder": 2,
}


def _style(colours: Sequence[str], colour: int, marker: int) -> dict[str, Any]:
    return {"color": colours[colour % len(colours)], "marker": MARKERS[marker % len(MARKERS)]}


def _styles(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return each series' style: kernels first, then peers.

    Of several kernels with several blocks (or roundings, …) each, a colour stands for what the
    kernels have in common and a marker for the kernel; of more kernels than there are markers the
    other way round.
    """
    parted = [one.label.partition(", ")[::2] for one in series if one.role == "kernel"]
    kernels, variants = (list(dict.fromkeys(pair[i] for pair in parted)) for i in range(2))
    if len(kernels) > 1 and len(variants) > 1:
        places = [(variants.index(v), kernels.index(k)) for k, v in parted]
        if len(kernels) > len(MARKERS):
            places = [place[::-1] for place in places]
    else:
        places = [(i, i) for i in range(len(parted))]
    ours = [KERNELS | _style(KERNEL_COLOURS, *place) for place in places]
    return ours + [PEERS | _style(PEER_COLOURS, i, i) for i in range(len(series) - len(parted))]


Value = Callable[[Row], float | None]


def _drawn(ax: Axes, series: Sequence[Series], axis: Axis, label: str, value: Value) -> bool:
    """Draw values over shapes, of a shape alone bars; return whether there are several."""
    several = len(axis.ticks) > 1
    if several:
        _draw(ax, series, axis, value)
        ax.set_ylabel(label)
    else:
        _bars(ax, series, value)
        ax.set_xlabel(label)
    return several


def _draw(ax: Axes, series: Sequence[Series], axis: Axis, value: Value) -> None:
    for one, style in zip(series, _styles(series), strict=True):
        timed = [row for row in one.rows if value(row) is not None]
        at = grouped(timed, lambda row: axis.position[shape_of(row)])
        # Where several rows share a shape (a peer beside each block), their median.
        ys = [median(value(row) or 0.0 for row in at[x]) for x in sorted(at)]
        line = style if axis.numeric else {**style, "linestyle": ""}
        ax.plot(sorted(at), ys, **line)
    if axis.numeric:
        ax.set_xscale("log", base=2)
    crowded = len(axis.ticks) > 6 or not axis.numeric
    style = {"rotation": 45, "ha": "right", "fontsize": SMALL, "rotation_mode": "anchor"}
    ax.set_xticks(list(axis.ticks), list(axis.ticks.values()), **(style if crowded else {}))
    ax.minorticks_off()
    if not axis.numeric:
        ax.margins(x=0.08)
    ax.set_xlabel(axis.label)
    plain(ax)


def _bars(ax: Axes, series: Sequence[Series], value: Value) -> None:
    """Draw one shape alone: a bar for each series, the first on top."""
    for i, (one, style) in enumerate(zip(series, _styles(series), strict=True)):
        values = [y for row in one.rows if (y := value(row)) is not None]
        if values:
            bar = ax.barh(
                i,
                median(values),
                height=0.7,
                color=style["color"],
                zorder=2,
                alpha=1.0 if one.role == "kernel" else 0.45,
            )
            ax.bar_label(bar, fmt=lambda y: significant(y, 4), padding=3, fontsize=SMALL)
    ax.set_yticks(range(len(series)), [verbatim(one.label) for one in series], fontsize=SMALL)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    plain(ax)
    ax.grid(False, axis="y")


def _rate(ax: Axes, series: Sequence[Series], axis: Axis, peaks: Mapping[str, Any]) -> None:
    compute = any(row.tflops is not None for s in series for row in s.rows)
    label = "TFLOP/s" if compute else "GB/s (fewest bytes / time)"

    def value(row: Row) -> float | None:
        return row.tflops if compute else row.gbps

    if not _drawn(ax, series, axis, label, value):
        return
    names = {"int8_tops": "INT8", "bf16_tflops": "BF16"} if compute else {"copy_gbps": "copy"}
    for name, text in names.items():
        if name in peaks:
            ax.axhline(peaks[name], color="#999999", linewidth=1, linestyle=":", zorder=1)
            level = f"{text} peak, measured: {significant(peaks[name], 4)}"
            across = ("axes fraction", "data")
            note(ax, level, (0.01, peaks[name]), (0, 3), xycoords=across)
    ax.set_ylim(bottom=0)


def _roofline(ax: Axes, series: Sequence[Series], peaks: Mapping[str, Any]) -> None:
    """Draw TFLOP/s against operations per byte, under the measured ceilings."""
    peak, slope = peaks["int8_tops"], peaks["copy_gbps"] / 1e3  # TFLOP/s, TB/s
    intensities = []
    for one, style in zip(series, _styles(series), strict=True):
        rows = [row for row in one.rows if row.tflops and row.gbps]
        xs = [1e3 * (row.tflops or 0) / (row.gbps or 1) for row in rows]
        intensities += xs
        ax.plot(xs, [row.tflops or 0 for row in rows], **{**style, "linestyle": ""})
    low = min(*intensities, peak / slope) / 4
    high = max(*intensities, peak / slope) * 2
    ax.plot([low, peak / slope, high], [low * slope, peak, peak], color="#333333", linewidth=1.5)
    note(ax, f"INT8 peak {significant(peak, 4)}", (low, peak), (0, -3), va="top")
    copy = f"copy {significant(slope * 1e3, 4)} GB/s"
    note(ax, copy, (low, low * slope), (12, 0), va="top")
    ax.set_xscale("log")
    ax.set_yscale("log")
    readable(ax.xaxis)
    readable(ax.yaxis)
    ax.set_xlabel("operations per byte (fewest bytes)")
    ax.set_ylabel("TFLOP/s")
    plain(ax)


def figure(rows: Sequence[Row], device: Mapping[str, Any]) -> Figure:
    """Draw each op's charts below each other, and their legend."""
    parts = [_Part.of(part) for part in by_op(rows) if any(row.ms is not None for row in part)]
    peaks = device.get("peaks") or {}
    heights = [part.height(peaks) for part in parts]
    fig = canvas(sum(heights))
    subfigures = fig.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for sub, part in zip(subfigures, parts, strict=True):
        sub.suptitle(f"{part.title}\n{where(device)}", fontsize=11)
        part.draw(sub, peaks)
    return fig


@dataclass(frozen=True)
class _Part:
    """One op's rows as series, and where their shapes stand."""

    title: str
    series: Sequence[Series]
    axis: Axis

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Part:
        series = series_of(rows)
        title = textwrap.fill(f"{rows[0].op}   {problem_text(varying(rows)[0])}", 80)
        return cls(title, series, axis_of([row for one in series for row in one.rows]))

    @property
    def labels(self) -> list[str]:
        return [one.label for one in self.series]

    @property
    def several(self) -> bool:
        return len(self.axis.ticks) > 1

    def roofline(self, peaks: Mapping[str, Any]) -> bool:
        known = {"int8_tops", "copy_gbps"} <= set(peaks)
        return known and any(row.tflops for one in self.series for row in one.rows)

    def heights(self, peaks: Mapping[str, Any]) -> list[float]:
        """Return the charts' inches: time, rate and, of an op that computes, the roofline."""
        bars = 0.8 + 0.26 * len(self.series)
        each = 3.0 if self.several else bars
        return [each, each, *([3.0] if self.roofline(peaks) else [])]

    def height(self, peaks: Mapping[str, Any]) -> float:
        return 0.5 + sum(self.heights(peaks)) + legend_height(self.labels)

    def draw(self, sub: SubFigure, peaks: Mapping[str, Any]) -> None:
        heights = self.heights(peaks)
        axes = sub.subplots(len(heights), 1, height_ratios=heights)
        series, axis = self.series, self.axis
        if _drawn(axes[0], series, axis, "time, µs", lambda row: row.ms and row.ms * 1e3):
            axes[0].set_yscale("log")
            readable(axes[0].yaxis)
        _rate(axes[1], series, axis, peaks)
        if self.roofline(peaks):
            _roofline(axes[2], series, peaks)
        if self.several:  # bars have their names beside them
            legend(sub, axes[0].lines, self.labels)


def promotion_figure(rows: Sequence[Row], device: Mapping[str, Any]) -> Figure:
    """Draw speed against SQNR, a chart per kind of data: up and to the right is better.

    A line for each schedule, through its K per promotion; a point for each peer. Where A's rows
    differ in size, as gradients' do, one more chart has the median over the rows of C.
    """
    timed = [row for row in rows if row.tflops is not None and row.sqnr_db is not None]
    points = grouped(timed, lambda row: (row.role, row.label))
    series = [Series(label, role, tuple(points[role, label])) for role, label in sorted(points)]
    charts = [(kind, False) for kind in dict.fromkeys(row.data for row in timed)]
    charts += [(kind, True) for kind, _ in charts if "gradient" in (kind or "")]
    shape = shape_text(timed[0].problem, ())
    title = f"What a promotion costs: GEMM {shape}, BF16 out\n{where(device)}"
    lines = math.ceil(len(charts) / 2)
    labels = [one.label for one in series]
    fig = canvas(0.6 + 3.2 * lines + legend_height(labels), title)
    axes = fig.subplots(lines, min(2, len(charts)), sharey=True, squeeze=False).flat
    for ax in axes[len(charts) :]:
        ax.remove()
    for ax, (kind, by_row) in zip(axes, charts, strict=False):
        for i, (one, style) in enumerate(zip(series, _styles(series), strict=True)):
            here = Series(one.label, one.role, tuple(r for r in one.rows if r.data == kind))
            _tradeoff(ax, here, by_row, style, left=i % 2 == 0)
        ax.set_title(f"{data_text(kind)} data", fontsize=10)
        ax.set_xlabel("SQNR of the median row of C, dB" if by_row else "SQNR, dB")
        ax.margins(x=0.2)
        plain(ax)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("TOPS")
    axes[0].set_ylim(bottom=0)  # of all: they share it, and by now it holds all that is drawn
    legend(fig, axes[0].lines, labels)
    return fig


def _tradeoff(ax: Axes, series: Series, by_row: bool, style: Mapping[str, Any], left: bool) -> None:
    """Draw a schedule's line, each point with its K per promotion; or a peer's median point."""
    rows = sorted(series.rows, key=lambda row: row.problem["block"])
    xs = [(row.row_sqnr_db if by_row else row.sqnr_db) or 0.0 for row in rows]
    ys = [row.tflops or 0.0 for row in rows]
    if series.role == "peer" and rows:
        xs, ys = [median(xs)], [median(ys)]
        style = {**style, "linestyle": "", "markersize": 7}
    ax.plot(xs, ys, **style)
    if series.role == "peer":
        return
    for x, y, row in zip(xs, ys, rows, strict=True):
        # A line falls to the right, so below it at the left and above it at the right is room.
        away, side, rise = ((-5, -4), "right", "top") if left else ((7, 2), "left", "bottom")
        text = f"K {row.problem['block']}"
        note(ax, text, (x, y), away, ha=side, va=rise)


def plot(rows: Sequence[Row], device: Mapping[str, Any], path: Path, description: str = "") -> None:
    """Draw the rows to a .png, .svg or .pdf file, equal bytes for equal rows.

    Those of the promotion's curve are drawn as such, where there are no others.
    """
    if not any(row.ms is not None for row in rows):
        return
    draw = promotion_figure if all(row.curve == "promotion" for row in rows) else figure
    save(draw(rows, device), path, description)
