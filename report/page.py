"""A page for a browser: one HTML file that needs nothing else, with Plotly and figures' data in it.

A template extends page.html.j2, which has the look, the drawing and what the keyboard does.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core.errors import not_installed
from jetfire.core.files import check_output

if TYPE_CHECKING:
    import plotly.graph_objects as go

GRID = "rgba(128,128,128,0.25)"
# Of lines, told from white and from black alike; the first four are Okabe and Ito's.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a67c00", "#aa4499", "#888888", "#5e7f2f")


@dataclass(frozen=True)
class PageChart:
    """A figure's place on a page.

    Attributes:
        figure: None where there is nothing to draw; `missing` then says why.
        width: the fewest pixels that it needs; where there are less, it scrolls.
    """

    id: str
    title: str
    caption: str
    figure: go.Figure | None
    missing: str = ""
    width: int = 0

    @property
    def data(self) -> str | None:
        return None if self.figure is None else script_json(self.figure.to_json())


def require_plotly() -> None:
    """Refuse to go on without Plotly.

    Raises:
        UsageError: it is missing.
    """
    if find_spec("plotly") is None:
        raise not_installed("plotly", "html")


def check_page(file: Path | None) -> None:
    """Check a page's file before anything is done; None where it was not given.

    Raises:
        UsageError: the file is not named .html or cannot be written, or Plotly is missing.
    """
    check_output("--report", file, ".html")
    if file is not None:
        require_plotly()


def render(template: str, **values: Any) -> str:
    """Return a page's HTML: of equal values the same text.

    Raises:
        UsageError: Plotly is missing.
    """
    import jinja2

    require_plotly()
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(plotly=get_plotlyjs(), **values)


def script_json(text: str) -> str:
    """Return the same JSON with nothing that could end a script element; keys sorted."""
    dumped = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    for character in "<>&":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return dumped


def escaped(text: object) -> str:
    """Return a text that is shown as it is: Plotly reads some HTML tags."""
    return html.escape(str(text), quote=False)


def blank(height: int, **layout: Any) -> go.Figure:
    """Return an empty figure of so many pixels.

    It is transparent, so that the page's colours show through; the page colours its texts too.
    """
    import plotly.graph_objects as go

    made = go.Figure()
    made.update_layout(
        template=go.layout.Template(),
        height=height,
        # At the right the buttons stand below each other, where no legend comes.
        margin={"l": 64, "r": 44, "t": 16, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        font={"color": "#808080", "family": "system-ui, sans-serif", "size": 12},
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "bgcolor": "rgba(0,0,0,0)",
        },
        hoverlabel={
            "bgcolor": "#222222",
            "bordercolor": "#888888",
            "align": "left",
            "font": {"color": "#ffffff", "family": "ui-monospace, monospace"},
        },
        modebar={"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#808080"},
    )
    made.update_layout(**layout)
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 10},
    }
    made.update_xaxes(**axis)
    made.update_yaxes(**axis)
    return made
