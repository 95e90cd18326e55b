"""What INT8 does to each layer of a run over its steps: heat maps of signal to noise.

A map for each kind of operand has a row for each layer, those of one name in all blocks together,
the first block on top.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jetfire.report.chart import GAP, HEAT, SMALL, verbatim
from jetfire.report.page import PageChart, blank, escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

KINDS = {"weight": "weights", "input": "inputs", "gradient": "gradients of outputs"}
COLUMNS = 300  # of a map; more are finer than it is wide
MAPPED = 8  # runs; each takes a third of a second to draw and fills a screen
_BIT = 6.0  # dB; colours span as much at least, so that what differs by less looks alike
_LABELS = 8  # of rows; more would overlap

Grid = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)  # of arrays none can be asked for
class WatchedRun:
    """A run's watched steps, of which neighbours share a column where they are many.

    Attributes:
        steps: the first of each column.
        layers: as the maps have their rows: those of the first and of the last watched step.
        sqnr: by kind, layers × columns in dB, the lowest of each column's steps; NaN without any.
        lowest: by kind, of all steps: dB, layer and step.
    """

    label: str
    steps: list[int]
    layers: list[str]
    sqnr: dict[str, Grid]
    lowest: dict[str, tuple[float, str, int]]

    @classmethod
    def of(cls, label: str, records: Sequence[Mapping[str, Any]]) -> WatchedRun | None:
        """Return what a log says; None of a run that was not watched."""
        seen = [record for record in records if record["kind"] == "watch"]
        layers = _ordered([*{**seen[0]["layers"], **seen[-1]["layers"]}]) if seen else []
        if not layers:
            return None
        rows = {layer: row for row, layer in enumerate(layers)}
        stride = -(-len(seen) // COLUMNS)
        steps = [record["step"] for record in seen[::stride]]
        sqnr = {kind: np.full((len(layers), len(steps)), np.nan) for kind in KINDS}
        lowest: dict[str, tuple[float, str, int]] = {}
        for number, record in enumerate(seen):
            for layer, kind, value in _ratios(record):
                if layer in rows:
                    cell = rows[layer], number // stride
                    sqnr[kind][cell] = np.fmin(sqnr[kind][cell], value)
                    found = value, layer, record["step"]
                    lowest[kind] = min(lowest.get(kind, found), found)
        return cls(label, steps, layers, sqnr, lowest)

    def title(self, kind: str) -> str:
        """Return a map's title, with the lowest value in it."""
        if kind not in self.lowest:
            return f"{KINDS[kind]}\nnothing seen"
        value, layer, step = self.lowest[kind]
        return f"{KINDS[kind]}\nlowest {value:.1f} dB: {layer}, step {step}"

    def span(self, kind: str) -> tuple[float, float]:
        """Return the ratios of the darkest and the lightest colour."""
        known = self.sqnr[kind][~np.isnan(self.sqnr[kind])]
        high = float(known.max(initial=0.0))
        return min(float(known.min(initial=high)), high - _BIT), high

    @property
    def height(self) -> float:
        """Inches of its maps."""
        return 0.7 + len(KINDS) * (0.6 + min(4.0, max(1.2, 0.06 * len(self.layers))))


def _ratios(record: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield layer, kind and dB of what is finite."""
    for layer, kinds in record["layers"].items():
        for kind in KINDS:
            value = kinds.get(kind, {}).get("sqnr")
            if value is not None:
                yield layer, kind, value


def _parted(layer: str) -> tuple[str, tuple[int, ...]]:
    """Return a layer's name without the numbers in it, and these."""
    parts = layer.split(".")
    numbers = tuple(int(part[:9]) for part in parts if part.isdecimal())
    return ".".join(part for part in parts if not part.isdecimal()), numbers


def _ordered(layers: Sequence[str]) -> list[str]:
    """Return layers of one name together, by depth; names in order of the first."""
    names = list(dict.fromkeys(_parted(layer)[0] for layer in layers))
    place = {name: i for i, name in enumerate(names)}
    return sorted(layers, key=lambda layer: (place[_parted(layer)[0]], _parted(layer)[1]))


def draw(part: SubFigure, run: WatchedRun) -> None:
    """Draw a run's maps below each other."""
    title = textwrap.fill(f"signal to quantisation noise: {run.label}", 70)
    part.suptitle(verbatim(title), fontsize=10)
    axes = part.subplots(len(KINDS), 1, sharex=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        ax.set_facecolor(GAP)
        low, high = run.span(kind)
        shown = ax.imshow(
            run.sqnr[kind], HEAT, aspect="auto", interpolation="nearest", vmin=low, vmax=high
        )
        bar = part.colorbar(shown, ax=ax, aspect=12)
        bar.ax.tick_params(labelsize=SMALL)
        bar.set_label("dB", fontsize=SMALL)
        ax.set_title(verbatim(run.title(kind)), fontsize=SMALL)
        _label_rows(ax, run.layers)
    ticks = range(0, len(run.steps), math.ceil(len(run.steps) / 8))
    axes[-1].set_xticks(ticks, [str(run.steps[i]) for i in ticks], fontsize=SMALL)
    axes[-1].set_xlabel("step")


def _label_rows(ax: Axes, layers: Sequence[str]) -> None:
    """Name each group of rows at its middle, with a line between two."""
    groups = [
        (name.rpartition(".")[2], len(list(of)))
        for name, of in groupby(layers, lambda layer: _parted(layer)[0])
    ]
    ends = [end - 0.5 for end in accumulate(count for _, count in groups)]
    middles = [end - count / 2 for end, (_, count) in zip(ends, groups, strict=True)]
    named = slice(None, None, max(1, math.ceil(len(groups) / _LABELS)))
    names = [verbatim(name) for name, _ in groups[named]]
    ax.set_yticks(middles[named], names, fontsize=SMALL)
    for end in ends[:-1][named]:
        ax.axhline(end, color="white", linewidth=1)


def worst(runs: Sequence[WatchedRun]) -> list[WatchedRun]:
    """Return the MAPPED runs with the lowest ratios, in their order: nobody looks at more maps."""

    def lowest(run: WatchedRun) -> float:
        return min((value for value, _, _ in run.lowest.values()), default=math.inf)

    kept = sorted(runs, key=lowest)[:MAPPED]
    return [run for run in runs if run in kept]


def page_chart(run: WatchedRun, kind: str, identifier: str) -> PageChart:
    """Return one of the maps, for a page: a cell tells its layer and step."""
    import plotly.graph_objects as go

    title, lowest = run.title(kind).split("\n")
    caption = f"Signal to noise by layer and step; {lowest}."
    if kind not in run.lowest:
        return PageChart(f"{identifier}-{kind}", title, caption, None, caption)
    low, high = run.span(kind)
    figure = blank(120 + max(60, 16 * min(60, len(run.layers))), margin={"t": 70})
    figure.add_trace(
        go.Heatmap(
            x=run.steps,
            y=list(map(escaped, run.layers)),
            z=run.sqnr[kind],
            zmin=low,
            zmax=high,
            colorscale=HEAT,
            colorbar={
                "ticksuffix": " dB",
                "tickangle": 0,
                "nticks": 5,
                "orientation": "h",
                "yref": "container",
                "y": 1,
                "yanchor": "top",
                "thickness": 10,
            },
            hovertemplate="%{y}, step %{x}: %{z:.1f} dB<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="layer", autorange="reversed")
    return PageChart(f"{identifier}-{kind}", title, caption, figure)
