"""What INT8 does to each layer of a run over its steps: heat maps of signal to noise.

A map for each kind of operand has a row for each layer, those of one name in all blocks together,
the first block on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jetfire.report.chart import GAP, HEAT, verbatim

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

KINDS = {"weight": "weights", "input": "inputs", "gradient": "gradients of outputs"}
COLUMNS = 300  # of a map; more are finer than it is wide
_BIT = 6.0  # dB; colours span as much at least, so that what differs by less looks alike
_LABELS = 20  # of rows; more would overlap

Grid = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
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
        return 2 + min(6.0, max(1.5, 0.06 * len(self.layers)))


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
    """Draw a run's maps side by side."""
    part.suptitle(f"signal to quantisation noise, dB: {verbatim(run.label)}", fontsize=10)
    axes = part.subplots(1, len(KINDS), sharey=True)
    for ax, kind in zip(axes, KINDS, strict=True):
        ax.set_facecolor(GAP)
        low, high = run.span(kind)
        shown = ax.imshow(
            run.sqnr[kind], HEAT, aspect="auto", interpolation="nearest", vmin=low, vmax=high
        )
        part.colorbar(shown, ax=ax, location="bottom", aspect=30).ax.tick_params(labelsize=8)
        ax.set_title(run.title(kind), fontsize=8)
        ticks = range(0, len(run.steps), math.ceil(len(run.steps) / 5))
        ax.set_xticks(ticks, [str(run.steps[i]) for i in ticks], fontsize=8)
        ax.set_xlabel("step", fontsize=8)
    _label_rows(axes, run.layers)


def _label_rows(axes: Sequence[Axes], layers: Sequence[str]) -> None:
    """Name each group of rows at its middle, with a line between two."""
    groups = [
        (name.rpartition(".")[2], len(list(of)))
        for name, of in groupby(layers, lambda layer: _parted(layer)[0])
    ]
    ends = [end - 0.5 for end in accumulate(count for _, count in groups)]
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
    figure = make_subplots(
        1, len(KINDS), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles
    )
    for column, kind in enumerate(KINDS):
        bar = {"orientation": "h", "x": (column + 0.5) / len(KINDS), "y": -0.15, "len": 0.28}
        low, high = run.span(kind)
        cells = go.Heatmap(
            x=run.steps,
            y=run.layers,
            z=run.sqnr[kind],
            zmin=low,
            zmax=high,
            colorscale=HEAT,
            colorbar={**bar, "yanchor": "top", "thickness": 10},
            hovertemplate="%{y}, step %{x}: %{z:.1f} dB<extra></extra>",
        )
        figure.add_trace(cells, 1, column + 1)
    figure.update_yaxes(autorange="reversed")
    figure.update_annotations(font_size=12)
    figure.update_layout(
        template="plotly_white",
        title=f"signal to quantisation noise, dB: {run.label}",
        height=240 + max(200, 12 * min(60, len(run.layers))),
        margin={"t": 110},
    )
    return figure
