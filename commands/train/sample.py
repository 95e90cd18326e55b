"""`jetfire train sample`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train sample runs/int8 --prompt 'The kernel'"


def run(
    run: o.Run,
    prompt: Annotated[
        str, o.option("--prompt", "TEXT", "What the text begins with (a new document).")
    ] = "",
    tokens: Annotated[int, o.integer("--tokens", "How many to write.", 1)] = 200,
    temperature: Annotated[
        float, o.number("--temperature", "T", "0 takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int, o.integer("--top-k", "Draw among so many of the likeliest.", 1)] = 200,
    device: o.Device = "auto",
    seed: o.Seed = 0,
    debug: o.Debug = False,
) -> None:
    """Write text with a run's model."""
    from jetfire.gpt2.training.options import no_run

    if not run.is_dir():
        raise no_run(run)
    from jetfire.gpt2.training import command

    command.sample(
        run, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed, device=device
    )
