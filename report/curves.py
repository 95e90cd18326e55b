"""Loss curves of several runs over each other: an image by matplotlib, a page by Plotly."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jetfire.core.errors import UsageError
from jetfire.core.files import write
from jetfire.report import watched
from jetfire.report.chart import (
    KERNEL_COLOURS,
    MARKERS,
    canvas,
    legend,
    legend_height,
    plain,
    save,
    verbatim,
)
from jetfire.report.page import COLOURS, PageChart, blank, escaped, render, require_plotly
from jetfire.report.watched import WatchedRun

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

TEMPLATE = "curves.html.j2"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "cross")
POINTS = 400  # of a smoothed curve; more are finer than a line is wide
OFF_THE_SCALE = 20.0  # % of a last validation loss over the first run's
RAW = 2  # curves with each step's own loss behind them; of more these hide each other
LOSS = "loss, nats per token; dashed: validation"

StepValues = tuple[list[int], list[float]]  # steps, and a value at each


@dataclass(frozen=True)
class Curve:
    """One run: steps and losses in nats, of every step and of every evaluation."""

    label: str
    steps: list[int]
    losses: list[float]
    evaluated: list[int]
    validation: list[float]
    watched: WatchedRun | None = None

    @classmethod
    def of(cls, path: Path, records: Sequence[Mapping[str, Any]], label: str) -> Curve:
        """Return the curve of a run's log.

        Args:
            path: the log's, for messages.
        """
        steps = [r for r in records if r["kind"] == "step"]
        evaluations = [r for r in records if r["kind"] == "evaluation"]
        if not steps:
            raise UsageError(f"{path}: no step is in its log yet")
        return cls(
            label,
            [r["step"] for r in steps],
            [r["loss"] for r in steps],
            [r["step"] for r in evaluations],
            [r["loss"] for r in evaluations],
            WatchedRun.of(label, records),
        )

    def smooth(self) -> list[float]:
        """Return a running mean over about a fiftieth of the run, unbiased at its start."""
        keep = 1 - 1 / max(1.0, len(self.losses) / 50)
        mean, weight, out = 0.0, 0.0, []
        for loss in self.losses:
            mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
            out.append(mean / weight)
        return out

    def smooth_points(self) -> StepValues:
        """Return `smooth` at no more than about POINTS steps, the last one among them."""
        stride = -(-len(self.steps) // POINTS)
        first = (len(self.steps) - 1) % stride
        return self.steps[first::stride], self.smooth()[first::stride]


@dataclass(frozen=True)
class CurveGroup:
    """Runs drawn as one curve: a single one, or those of several seeds."""

    runs: list[Curve]
    mean: Curve

    @classmethod
    def of(cls, label: str, runs: list[Curve]) -> CurveGroup:
        """Return means over the steps that all of them have; the label is that of the mean."""
        best = [min(run.validation) for run in runs if run.validation]
        text = f"{label}, {len(runs)} seeds" if len(runs) > 1 else label
        if best:
            text += f", best validation {fmean(best):.4f}"
        steps, losses = _means([(run.steps, run.losses) for run in runs])
        evaluated, validation = _means([(run.evaluated, run.validation) for run in runs])
        return cls(runs, Curve(text, steps, losses, evaluated, validation))


def _aligned(series: Sequence[StepValues]) -> tuple[list[int], list[list[float]]]:
    """Return the steps that all have, and at each of them everyone's value."""
    at = [dict(zip(steps, values, strict=True)) for steps, values in series]
    shared = [step for step in series[0][0] if all(step in one for one in at)]
    return shared, [[one[step] for one in at] for step in shared]


def _means(series: Sequence[StepValues]) -> StepValues:
    steps, columns = _aligned(series)
    return steps, [fmean(column) for column in columns]


def watched_of(groups: Sequence[CurveGroup]) -> list[WatchedRun]:
    """Return what was watched of the groups' runs."""
    return [run.watched for group in groups for run in group.runs if run.watched is not None]


def apart(base: Curve, other: Curve) -> StepValues:
    """Return steps that both evaluated, and how far this loss is above the base's there, in %."""
    known = dict(zip(base.evaluated, base.validation, strict=True))
    both = [(s, v) for s, v in zip(other.evaluated, other.validation, strict=True) if s in known]
    return [s for s, _ in both], [100 * (v / known[s] - 1) for s, v in both]


def _near(base: Curve, group: CurveGroup) -> bool:
    """Return whether a group ends near the base; one that diverged would flatten the others."""
    last = apart(base, group.mean)[1][-1:]
    return not last or last[0] <= OFF_THE_SCALE


def _limits(groups: Sequence[CurveGroup]) -> tuple[float, float]:
    """Return losses to show: all but the first steps' fall, which would flatten the rest."""
    curves = [curve for group in groups for curve in group.runs]
    return _around(
        [loss for c in curves for loss in c.smooth()[len(c.losses) // 20 :] + c.validation]
    )


def _around(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return low - 0.03 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3


def image(
    groups: Sequence[CurveGroup],
    output: Path,
    description: str,
    title: str = "",
    first: str = "the first",
    maps: Sequence[WatchedRun] = (),
) -> None:
    """Losses, and below them how far the validation losses are from the first group's, and maps.

    Args:
        first: the first group's name on the lower axis.
    """
    base = groups[0].mean
    near = [group for group in groups if _near(base, group)]
    labels = [
        group.mean.label + ("" if group in near else " (off the scale of the lower chart)")
        for group in groups
    ]
    below = any(apart(base, group.mean)[0] for group in groups[1:])
    heights = [(6 if below else 4) + legend_height(labels), *(run.height for run in maps)]
    fig = canvas(sum(heights), title)
    top, *parts = fig.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, run in zip(parts, maps, strict=True):
        watched.draw(part, run)
    axes = top.subplots(
        2 if below else 1, 1, squeeze=False, sharex=True, height_ratios=[2, 1] if below else [1]
    )[:, 0]
    lines = []
    for index, group in enumerate(groups):
        colour = KERNEL_COLOURS[index % len(KERNEL_COLOURS)]
        marker = MARKERS[index % len(MARKERS)]
        lines.append(_losses(axes[0], group, colour, marker, raw=len(groups) <= RAW))
        if below:
            _differences(axes[1], base, group, colour, marker)
    axes[0].set_ylim(*_limits(near))
    axes[0].set_ylabel(LOSS)
    if below:
        axes[1].set_ylim(*_difference_limits(base, near))
        axes[1].set_ylabel(f"validation loss over\n{verbatim(first)}'s, %")
    for ax in axes:
        plain(ax)
    axes[-1].set_xlabel("step")
    legend(top, lines, labels)
    save(fig, output, description)


def _difference_limits(base: Curve, near: Sequence[CurveGroup]) -> tuple[float, float]:
    differences = (apart(base, run)[1] for group in near for run in group.runs)
    return _around([0.0, *(value for run in differences for value in run)])


def _losses(ax: Axes, group: CurveGroup, colour: str, marker: str, raw: bool) -> Line2D:
    """Draw the mean's training loss, smoothed, and validation loss; of several runs each too.

    Returns:
        The line that stands for them in a legend.
    """
    mean = group.mean
    if len(group.runs) > 1:
        for run in group.runs:
            ax.plot(*run.smooth_points(), color=colour, linewidth=0.6, alpha=0.4)
        _band(ax, [(run.evaluated, run.validation) for run in group.runs], colour)
    elif raw:
        ax.plot(mean.steps, mean.losses, color=colour, linewidth=0.6, alpha=0.25)
    (line,) = ax.plot(*mean.smooth_points(), color=colour, linewidth=1.4)
    dashed: dict[str, Any] = {
        "linestyle": "--",
        "marker": marker,
        "markersize": 3.5,
        "linewidth": 0.8,
    }
    ax.plot(mean.evaluated, mean.validation, color=colour, **dashed)
    return line


def _differences(ax: Axes, base: Curve, group: CurveGroup, colour: str, marker: str) -> None:
    if group.mean is base:
        ax.axhline(0, color=colour, linewidth=1)
    else:
        ax.plot(
            *apart(base, group.mean), color=colour, marker=marker, markersize=3.5, linewidth=1.2
        )
    _band(ax, [apart(base, run) for run in group.runs], colour)


def _band(ax: Axes, series: Sequence[StepValues], colour: str) -> None:
    """From the lowest to the highest of several, where all of them have a value."""
    if len(series) > 1:
        steps, columns = _aligned(series)
        ax.fill_between(
            steps,
            [min(c) for c in columns],
            [max(c) for c in columns],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )


def page(groups: Sequence[CurveGroup], output: Path, maps: Sequence[WatchedRun] = ()) -> None:
    """Write a page with the losses and the maps, which its reader may enlarge.

    Raises:
        UsageError: the file cannot be written, or Plotly is missing.
    """
    require_plotly()
    base = groups[0].mean
    near = [group for group in groups if _near(base, group)]
    charts = [
        PageChart(
            "losses",
            "loss",
            "Training loss, a running mean, and validation loss, dashed.",
            _loss_figure(groups, _limits(near)),
        )
    ]
    if any(apart(base, group.mean)[0] for group in groups[1:]):
        charts.append(
            PageChart(
                "differences",
                "validation loss over the first's",
                f"In %, of {base.label}; a run that ends more than {OFF_THE_SCALE:.0f}% above it "
                "is off the scale.",
                _difference_figure(groups, _difference_limits(base, near)),
            )
        )
    drawn = [
        (run.label, [watched.page_chart(run, kind, f"run-{i}") for kind in watched.KINDS])
        for i, run in enumerate(maps)
    ]
    names = ", ".join(group.mean.label.split(", ")[0] for group in groups[:3])
    title = f"Training: {names}{', …' if len(groups) > 3 else ''}"
    write(output, render(TEMPLATE, title=title, charts=charts, maps=drawn))


def _page_line(index: int, group: CurveGroup, **line: Any) -> dict[str, Any]:
    """Return how a group's lines look, and what belongs to them in the legend."""
    colour, symbol = COLOURS[index % len(COLOURS)], SYMBOLS[index % len(SYMBOLS)]
    return {
        "name": "<br>".join(map(escaped, textwrap.wrap(group.mean.label, 40))),
        "legendgroup": str(index),
        "line": {"color": colour, "width": 1.6, **line},
        "marker": {"symbol": symbol, "size": 7},
    }


def _loss_figure(groups: Sequence[CurveGroup], limits: tuple[float, float]) -> go.Figure:
    figure = blank(480 + 20 * len(groups))
    for index, group in enumerate(groups):
        mean, look = group.mean, _page_line(index, group)
        steps, losses = mean.smooth_points()
        figure.add_scatter(x=steps, y=losses, mode="lines", **look)
        faint = {**look, "opacity": 0.35, "hoverinfo": "skip", "showlegend": False}
        if len(group.runs) > 1:
            for run in group.runs:
                steps, losses = run.smooth_points()
                figure.add_scatter(x=steps, y=losses, mode="lines", **faint)
        elif len(groups) <= RAW:
            figure.add_scatter(x=mean.steps, y=mean.losses, mode="lines", **faint)
        if mean.evaluated:
            dashed = _page_line(index, group, dash="dash", width=1)
            dashed |= {"name": f"{look['name']} (validation)", "showlegend": False}
            figure.add_scatter(x=mean.evaluated, y=mean.validation, mode="lines+markers", **dashed)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=LOSS, range=limits)
    figure.update_layout(hovermode="x unified")
    return figure


def _difference_figure(groups: Sequence[CurveGroup], limits: tuple[float, float]) -> go.Figure:
    figure = blank(320 + 20 * len(groups))
    for index, group in enumerate(groups):
        steps, shares = apart(groups[0].mean, group.mean)
        look = _page_line(index, group)
        figure.add_scatter(x=steps, y=shares, mode="lines+markers", **look)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="validation loss over the first's, %", range=limits)
    return figure
