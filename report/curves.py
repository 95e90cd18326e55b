"""Loss curves of several runs over each other: an image by matplotlib, a page by Plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jetfire.core.errors import UsageError, not_installed
from jetfire.core.files import write
from jetfire.report import watched
from jetfire.report.chart import KERNEL_COLOURS, MARKERS, canvas, plain, save, verbatim
from jetfire.report.watched import WatchedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 400  # of a smoothed curve; more are finer than a line is wide
OFF_THE_SCALE = 20.0  # % of a last validation loss over the first run's

Series = tuple[list[int], list[float]]  # steps, and a value at each


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
        """
        Args:
            path: the log's, for what is wrong with it.
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
        """A running mean over about a fiftieth of the run, unbiased at its start."""
        keep = 1 - 1 / max(1.0, len(self.losses) / 50)
        mean, weight, out = 0.0, 0.0, []
        for loss in self.losses:
            mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
            out.append(mean / weight)
        return out

    def smooth_points(self) -> Series:
        """`smooth` at no more than about POINTS steps, the last one among them."""
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
        """Means over the steps that all of them have; the label is that of the mean."""
        best = [min(run.validation) for run in runs if run.validation]
        text = f"{label}, {len(runs)} seeds" if len(runs) > 1 else label
        if best:
            text += f", best validation {fmean(best):.4f}"
        steps, losses = _means([(run.steps, run.losses) for run in runs])
        evaluated, validation = _means([(run.evaluated, run.validation) for run in runs])
        return cls(runs, Curve(text, steps, losses, evaluated, validation))


def _aligned(series: Sequence[Series]) -> tuple[list[int], list[list[float]]]:
    """The steps that all have, and at each of them everyone's value."""
    at = [dict(zip(steps, values, strict=True)) for steps, values in series]
    shared = [step for step in series[0][0] if all(step in one for one in at)]
    return shared, [[one[step] for one in at] for step in shared]


def _means(series: Sequence[Series]) -> Series:
    steps, columns = _aligned(series)
    return steps, [fmean(column) for column in columns]


def watched_of(groups: Sequence[CurveGroup]) -> list[WatchedRun]:
    """Return what was watched of the groups' runs."""
    return [run.watched for group in groups for run in group.runs if run.watched is not None]


def apart(base: Curve, other: Curve) -> Series:
    """Steps that both evaluated, and there the other's validation loss above the base's, in %."""
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
        first: what that is called there.
    """
    base = groups[0].mean
    below = any(apart(base, group.mean)[0] for group in groups[1:])
    heights = [7.5 if below else 5, *(run.height for run in maps)]
    fig = canvas(9, sum(heights), title)
    top, *parts = fig.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, run in zip(parts, maps, strict=True):
        watched.draw(part, run)
    axes = top.subplots(
        2 if below else 1, 1, squeeze=False, sharex=True, height_ratios=[2, 1] if below else [1]
    )[:, 0]
    near = [group for group in groups if _near(base, group)]
    for index, group in enumerate(groups):
        colour = KERNEL_COLOURS[index % len(KERNEL_COLOURS)]
        marker = MARKERS[index % len(MARKERS)]
        away = "" if group in near else " (below: off the scale)"
        _losses(axes[0], group, colour, marker, raw=len(groups) <= 2, away=away)
        if below:
            _differences(axes[1], base, group, colour, marker)
    axes[0].set_ylim(*_limits(near))
    axes[0].set_ylabel("loss, nats a token; dashed: validation")
    axes[0].legend(frameon=False, fontsize=9)
    if below:
        differences = (apart(base, run)[1] for group in near for run in group.runs)
        axes[1].set_ylim(*_around([0.0, *(value for run in differences for value in run)]))
        axes[1].set_ylabel(f"validation loss over\n{first}'s, %")
    for ax in axes:
        plain(ax)
    axes[-1].set_xlabel("step")
    save(fig, output, description)


def _losses(ax: Axes, group: CurveGroup, colour: str, marker: str, raw: bool, away: str) -> None:
    """Draw the mean's training loss, smoothed, and validation loss; of several runs each too."""
    mean = group.mean
    if len(group.runs) > 1:
        for run in group.runs:
            ax.plot(*run.smooth_points(), color=colour, linewidth=0.6, alpha=0.4)
        _band(ax, [(run.evaluated, run.validation) for run in group.runs], colour)
    elif raw:
        ax.plot(mean.steps, mean.losses, color=colour, linewidth=0.6, alpha=0.25)
    label = verbatim(mean.label + away)
    ax.plot(*mean.smooth_points(), color=colour, linewidth=1.4, label=label)
    ax.plot(
        mean.evaluated,
        mean.validation,
        color=colour,
        linestyle="--",
        marker=marker,
        markersize=3.5,
        linewidth=0.8,
    )


def _differences(ax: Axes, base: Curve, group: CurveGroup, colour: str, marker: str) -> None:
    if group.mean is base:
        ax.axhline(0, color=colour, linewidth=1)
    else:
        ax.plot(
            *apart(base, group.mean), color=colour, marker=marker, markersize=3.5, linewidth=1.2
        )
    _band(ax, [apart(base, run) for run in group.runs], colour)


def _band(ax: Axes, series: Sequence[Series], colour: str) -> None:
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
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise not_installed("plotly", "html") from None

    figure = go.Figure()
    for index, group in enumerate(groups):
        line = {"color": KERNEL_COLOURS[index % len(KERNEL_COLOURS)], "width": 1.6}
        shared = {"legendgroup": str(index), "line": line}
        mean = group.mean
        figure.add_scatter(x=mean.steps, y=mean.smooth(), name=mean.label, **shared)
        for run in group.runs:
            figure.add_scatter(
                x=run.steps,
                y=run.losses,
                opacity=0.25,
                hoverinfo="skip",
                showlegend=False,
                **shared,
            )
        if mean.evaluated:
            figure.add_scatter(
                x=mean.evaluated,
                y=mean.validation,
                mode="lines+markers",
                showlegend=False,
                name=f"{mean.label} (validation)",
                legendgroup=str(index),
                line={**line, "dash": "dash", "width": 1},
            )
    figure.update_layout(
        template="plotly_white",
        xaxis_title="step",
        hovermode="x unified",
        yaxis={"title": "loss, nats a token; dashed: validation", "range": _limits(groups)},
        legend={"orientation": "h", "y": -0.15},
    )
    figures = [figure, *map(watched.page_figure, maps)]
    parts = [
        one.to_html(include_plotlyjs=number == 0, full_html=False, default_height="90vh")
        for number, one in enumerate(figures)
    ]
    head = '<!doctype html><html><head><meta charset="utf-8"></head><body>'
    write(output, "\n".join([head, *parts, "</body></html>\n"]))
