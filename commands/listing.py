"""`jetfire list`."""

from __future__ import annotations

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(name="list", cls=Command)
def list_command(debug: o.Debug = False) -> None:
    """List ops, kernels, workloads and peers."""
    from jetfire.bench import command

    print(command.listing())
