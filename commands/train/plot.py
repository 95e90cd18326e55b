"""`jetfire train plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train plot runs/int8 runs/bf16 -o loss.svg"


def run(
    runs: Annotated[list[Path], o.argument("RUN...", "Runs' folders or logs.")],
    output: Annotated[Path, o.option("--output -o", "FILE", ".png, .svg, .pdf or .html.")],
    debug: o.Debug = False,
) -> None:
    """Draw loss curves of runs over each other, and maps of what was watched of them."""
    from jetfire.gpt2.training import curves

    curves.plot(runs, output)
