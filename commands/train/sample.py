"""`jetfire train sample`."""

from __future__ import annotations

from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def sample(
    run: o.Run,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="What the text begins with (a new document).")
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(parser=o.integer("--tokens", 1), metavar="INT", help="How many to write."),
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(parser=o.number("--temperature"), metavar="T", help="0 takes the likeliest "
                     "token."),
    ] = 0.8,
    top_k: Annotated[
        int,
        typer.Option(parser=o.integer("--top-k", 1), metavar="INT", help="Draw among so many of "
                     "the likeliest."),
    ] = 200,
    device: o.Device = "auto", seed: o.Seed = 0, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Write text with a run's model."""
    from jetfire.core import device as devices
    from jetfire.gpt2.options import no_run

    devices.check_name(device)
    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2 import command

    command.sample(run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed,
                   device=device)  # fmt: skip
