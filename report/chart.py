"""What all charts have in common: a look, colours, and a file that a digest of its rows names."""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core.files import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as MplAxis
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

# Inches and points: where a page is 500 pixels wide, a text has as many pixels as points.
WIDTH, SMALL = 7.0, 9
_LEGEND_LINE, _LETTERS = 0.21, 90  # of a legend: a line's inches, and how many letters it holds
# Okabe and Ito's palette, then Tol's, which colour-blind readers tell apart.
KERNEL_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#332288",
    "#117733",
    "#999933",
    "#AA4499",
    "#661100",
)
PEER_COLOURS = ("#000000", "#777777", "#a6761d", "#66a61e", "#7570b3", "#bbbbbb")
MARKERS = "osD^vP*X"
# Of maps: dark is low, for matplotlib and Plotly; and where there is no value.
HEAT, GAP = "viridis", "#dddddd"


@dataclass(frozen=True)
class Chart:
    """A plot's file, what it shows as JSON has it, and how it is drawn with a description."""

    path: Path
    content: Sequence[Any]
    draw: Callable[[Path, str], None]

    @property
    def digest(self) -> str:
        text = json.dumps(self.content, sort_keys=True)
        return f"rows sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def canvas(height: float, title: str = "") -> Figure:
    """Return an empty figure of so many inches, as wide as all are."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), layout="constrained")
    if title:
        made.suptitle(title, fontsize=11)
    return made


def plain(ax: Axes) -> None:
    ax.grid(True, color="#e6e6e6", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def readable(axis: MplAxis) -> None:
    """Put plain numbers at 1, 2 and 5 of each decade of a log axis, of many decades at 1 alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}".replace(",", " ")))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(labelsize=SMALL)


def verbatim(text: str) -> str:
    """Return a text that is shown as it is: what two $ enclose would be read as mathematics."""
    return text.replace("$", r"\$")


def note(ax: Axes, text: str, at: tuple[float, float], away: tuple[int, int], **more: Any) -> None:
    """Write a small text so many points away from a place, over what is drawn there."""
    style = {"textcoords": "offset points", "fontsize": SMALL, "color": "#444444", "zorder": 4}
    style["bbox"] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5}
    ax.annotate(text, at, xytext=away, **{**style, **more})


def _columns(labels: Sequence[str]) -> int:
    """Return how many labels stand side by side."""
    return max(1, _LETTERS // (max(map(len, labels), default=0) + 8))


def _wrapped(labels: Sequence[str]) -> list[str]:
    return [textwrap.fill(label, _LETTERS - 8) for label in labels]


def legend_height(labels: Sequence[str]) -> float:
    """Return the inches that a legend takes."""
    lines = sum(text.count("\n") + 1 for text in _wrapped(labels))
    return 0.1 + _LEGEND_LINE * math.ceil(lines / _columns(labels))


def legend(where: Figure | SubFigure, lines: Sequence[Line2D], labels: Sequence[str]) -> None:
    """Put a legend below a figure, or below a part of one."""
    made = where.legend(
        lines,
        [""] * len(lines),
        loc="outside lower center",
        ncols=_columns(labels),
        frameon=False,
        fontsize=SMALL,
    )
    # Written afterwards: a legend drops labels that begin with an underscore.
    for text, label in zip(made.get_texts(), _wrapped(labels), strict=True):
        text.set_text(verbatim(label))


def save(fig: Figure, path: Path, description: str) -> None:
    """Write a .png, .svg (which keeps the description) or .pdf: equal bytes for equal figures."""
    import matplotlib

    metadata: dict[str, Any] = {}
    if path.suffix == ".svg":
        metadata = {"Date": None, "Description": description}
    with matplotlib.rc_context({"svg.hashsalt": "jetfire", "svg.fonttype": "none"}):
        content = BytesIO()
        fig.savefig(content, format=path.suffix[1:].lower(), dpi=120, metadata=metadata)
    write(path, content.getvalue())
