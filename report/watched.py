"""What INT8 does to each layer of a run over its steps: heat maps of signal to noise.

A map for each kind of operand has a row for each layer, those of one name in all blocks together,
the first block on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jetfire.report.chart import GAP, HEAT

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

KINDS = {"weight": "weights", "input": "inputs", "gradient": "gradients of outputs"}
COLUMNS = 300  # of a map; more are finer than it is wide
_BIT = 6.0  # dB; colours span as much at least, so that what differs by less looks alike
_LABELS = 20  # of rows; more would overlap

Grid = np.ndarray[Any, np.dtype[np.float64]]  # layers × steps


@dataclass(frozen=True)
class WatchedRun:
    """A run's watched steps.

    Attributes:
        layers: as the maps have their rows.
        sqnr: by kind, layers × steps in dB; NaN where there is none.
    """

    label: str
    steps: list[int]
    layers: list[str]
    sqnr: dict[str, Grid]

    @classmethod
    def of(cls, label: str, records: Sequence[Mapping[str, Any]]) -> WatchedRun | None:
        """Return what a log says; None of a run that was not watched."""
        seen = [record for record in records if record["kind"] == "watch"]
        layers = _ordered(
            list(dict.fromkeys(layer for record in seen for layer in record["layers"]))
        )
        if not layers:
            return None
        sqnr = {
            kind: np.array([[_ratio(r, layer, kind) for r in seen] for layer in layers])
            for kind in KINDS
        }
        return cls(label, [record["step"] for record in seen], layers, sqnr)

    @property
    def starts(self) -> range:
        """The first step of each column, by its place among the steps."""
        return range(0, len(self.steps), -(-len(self.steps) // COLUMNS))

    def cells(self, kind: str) -> Grid:
        """Return a map: layers × columns, the lowest of each column's steps."""
        found: Grid = np.fmin.reduceat(self.sqnr[kind], self.starts, axis=1)
        return found

    def title(self, kind: str) -> str:
        """Return a map's title, with the lowest value in it."""
        grid = self.sqnr[kind]
        if np.isnan(grid).all():
            return f"{KINDS[kind]}\nnothing seen"
        layer, step = np.unravel_index(np.nanargmin(grid), grid.shape)
        where = f"{self.layers[layer]}, step {self.steps[step]}"
        return f"{KINDS[kind]}\nlowest {grid[layer, step]:.1f} dB: {where}"

    def span(self, kind: str) -> tuple[float, float]:
        """Return the ratios of the darkest and the lightest colour."""
        known = self.sqnr[kind][~np.isnan(self.sqnr[kind])]
        high = float(known.max(initial=0.0))
        return min(float(known.min(initial=high)), high - _BIT), high

    @property
    def height(self) -> float:
        """Inches of its maps."""
        return 2 + min(6.0, max(1.5, 0.06 * len(self.layers)))


def _ratio(record: Mapping[str, Any], layer: str, kind: str) -> float:
    found = record["layers"].get(layer, {}).get(kind)
    return math.nan if found is None or found["sqnr"] is None else found["sqnr"]


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
    """Draw a run's maps side by side."""
    part.suptitle(f"signal to quantisation noise, dB: {run.label}", fontsize=10)
    axes = part.subplots(1, len(KINDS), sharey=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        ax.set_facecolor(GAP)
        low, high = run.span(kind)
        shown = ax.imshow(
            run.cells(kind), HEAT, aspect="auto", interpolation="nearest", vmin=low, vmax=high
        )
        part.colorbar(shown, ax=ax, location="bottom", aspect=30).ax.tick_params(labelsize=8)
        ax.set_title(run.title(kind), fontsize=8)
        ticks = range(0, len(run.starts), math.ceil(len(run.starts) / 5))
        ax.set_xticks(ticks, [str(run.steps[run.starts[i]]) for i in ticks], fontsize=8)
        ax.set_xlabel("step", fontsize=8)
    _label_rows(axes, run.layers)


def _label_rows(axes: Sequence[Axes], layers: Sequence[str]) -> None:
    """Name each group of rows at its middle, with a line between two."""
    groups = [
        (name.rpartition(".")[2], len(list(of)))
        for name, of in groupby(layers, lambda layer: _parted(layer)[0])
    ]
    ends = [sum(count for _, count in groups[: i + 1]) - 0.5 for i in range(len(groups))]
    middles = [end - count / 2 for end, (_, count) in zip(ends, groups, strict=True)]
    named = slice(None, None, max(1, math.ceil(len(groups) / _LABELS)))
    axes[0].set_yticks(middles[named], [name for name, _ in groups[named]], fontsize=8)
    for ax in axes:
        for end in ends[:-1][named]:
            ax.axhline(end, color="white", linewidth=1)


def page_figure(run: WatchedRun) -> go.Figure:
    """Return the same maps, for a page: a cell tells its layer and step."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [run.title(kind).replace("\n", "<br>") for kind in KINDS]
    figure = make_subplots(1, len(KINDS), shared_yaxes=True, subplot_titles=titles)
    for column, kind in enumerate(KINDS):
        bar = {"orientation": "h", "x": (column + 0.5) / len(KINDS), "y": -0.15, "len": 0.28}
        low, high = run.span(kind)
        cells = go.Heatmap(
            x=[run.steps[start] for start in run.starts],
            y=run.layers,
            z=run.cells(kind),
            zmin=low,
            zmax=high,
            colorscale=HEAT,
            colorbar={**bar, "yanchor": "top", "thickness": 10},
            hovertemplate="%{y}, step %{x}: %{z:.1f} dB<extra></extra>",
        )
        figure.add_trace(cells, 1, column + 1)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        template="plotly_white",
        title=f"signal to quantisation noise, dB: {run.label}",
        height=240 + max(200, 12 * min(60, len(run.layers))),
        margin={"t": 110},
    )
    return figure
