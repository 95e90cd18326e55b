"""A chart of the shipped profiles: gains over the defaults, and how near lookups come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jetfire.measure.results import blocks_text
from jetfire.report.chart import KERNEL_COLOURS, MARKERS, canvas, plain, save
from jetfire.report.rows import grouped
from jetfire.report.text import times, where
from jetfire.report.tuned import NEAR, Lookup, ShippedEntry, in_use, mean_gain, near

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_T = TypeVar("_T", ShippedEntry, Lookup)


def _block(one: ShippedEntry) -> str:
    blocks = blocks_text(one.entry.problem)
    return f"block {blocks}" if blocks else "no blocks"


def plot(
    entries: Sequence[ShippedEntry],
    found: Sequence[Lookup],
    device: Mapping[str, Any],
    path: Path,
    description: str = "",
) -> None:
    """Draw a column for each op, its problems sorted; below it the same of the lookups, if any."""
    fig = canvas(10, 8.4 if found else 4.4, f"Tuned configs\n{where(device)}")
    axes = fig.subplots(2 if found else 1, 1, squeeze=False)[:, 0]
    _strips(
        axes[0],
        [one for one in in_use(entries) if one.gain is not None],
        lambda one: one.gain or math.nan,
        _block,
        mean_gain,
    )
    axes[0].set_title(
        "default / tuned, each problem; beside the op, the geometric mean", fontsize=10
    )
    axes[0].set_ylabel("gain over the default")
    if found:
        _strips(
            axes[1],
            found,
            lambda one: one.ratio,
            lambda one: f"{one.source} profile".replace("default profile", "default (none near)"),
            lambda part: f"{near(part)} of {len(part)}",
        )
        axes[1].axhline(NEAR, color="#999999", linewidth=1, linestyle=":", zorder=1)
        axes[1].set_title(
            f"lookup / tuned, each shape without a profile; beside the op, those within "
            f"{NEAR - 1:.0%}",
            fontsize=10,
        )
        axes[1].set_ylabel("time over the tuned config's")
    save(fig, path, description)


def _strips(
    ax: Axes,
    values: Sequence[_T],
    value: Callable[[_T], float],
    kind: Callable[[_T], str],
    summary: Callable[[Sequence[_T]], str],
) -> None:
    """Sorted points, a column an op and a colour a kind; the summary stands under the op's name."""
    columns = {op: sorted(part, key=value) for op, part in grouped(values, lambda v: v.op).items()}
    points: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in sorted({kind(v) for v in values}, key=lambda n: (len(n), n))
    }
    for i, part in enumerate(columns.values()):
        for rank, one in enumerate(part):
            xs, ys = points[kind(one)]
            xs.append(round(i - 0.4 + 0.8 * (rank + 0.5) / len(part), 4))
            ys.append(value(one))
        if i:
            ax.axvline(i - 0.5, color="#e6e6e6", linewidth=0.8)
    for i, (name, (xs, ys)) in enumerate(points.items()):
        ax.plot(
            xs,
            ys,
            linestyle="",
            marker=MARKERS[i],
            markersize=3.5,
            alpha=0.8,
            color=KERNEL_COLOURS[i],
            label=name,
        )
    names = [f"{op}  {summary(part)}" for op, part in columns.items()]
    ax.set_xticks(
        range(len(columns)), names, fontsize=8, rotation=40, ha="right", rotation_mode="anchor"
    )
    ax.set_xlim(-0.5, max(1, len(columns)) - 0.5)
    ax.yaxis.set_major_formatter(lambda y, _: times(y))
    plain(ax)
    ax.grid(False, axis="x")
    if points:
        ax.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
