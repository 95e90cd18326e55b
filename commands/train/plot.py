"""`jetfire train plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders or logs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help=".png, .svg, .pdf or .html.")
    ],
    debug: o.Debug = False,
) -> None:
    """Draw loss curves of runs over each other."""
    from jetfire.gpt2.curves import plot as draw

    draw(runs, output)
