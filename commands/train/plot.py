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
    runs: Annotated[list[Path], o.argument("RUN...", "Runs' folders or logs.")],
    output: Annotated[Path, o.option("--output -o", "FILE", ".png, .svg, .pdf or .html.")],
    debug: o.Debug = False,
) -> None:
    """Draw loss curves of runs over each other."""
    from jetfire.gpt2.curves import plot as draw

    draw(runs, output)
