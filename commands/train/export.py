"""`jetfire train export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def export(
    run: o.Run,
    output: Annotated[Path, o.option("--output -o", "FOLDER", "For the weights.")],
    debug: o.Debug = False,
) -> None:
    """Write a run's weights as transformers' GPT-2 reads them."""
    from jetfire.gpt2.options import no_run

    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2 import command

    command.export(run, output)
