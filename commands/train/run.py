"""`jetfire train` without a verb."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import RUN, OwnCommand
from jetfire.core.errors import UsageError

app = typer.Typer()
VERBS = ("prepare", "study", "plot", "sample", "export", "bench", "tune")


@app.command(
    RUN,
    cls=OwnCommand,
    hidden=True,
    epilog="Other verbs, each with --help: jetfire train prepare (text to tokens), study (recipes "
    "× seeds, paired), plot (loss curves), sample (text of a run's model), export (weights for "
    "transformers), bench (a step against BF16), tune (the kernels of a step).",
)
def _train(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET", help="tiny, shakespeare-char, gpt2-124m, -350m, -774m, "
                       "-1558m.", autocompletion=o.completing(o.PRESETS, VERBS)),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bf16, int8, int8-block32, -block64, -block128, int4-hq-lss, int4-hq, int4-naive"
            " (int8).",
            autocompletion=o.completing(o.RECIPES),
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="Any other setting: batch, rate, …"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=o.integer("--steps", 1), metavar="INT", help="Optimizer steps."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="python, shakespeare, shakespeare-char, "
                     "openwebtext; a prepared folder; a text file.",
                     autocompletion=o.completing(o.CORPORA)),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="RUN", help="Folder of the run's log and "
                     "checkpoints (runs/PRESET-RECIPE)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with -o RUN from its last checkpoint.")
    ] = False,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Begin with the weights of a run, a checkpoint or a "
                     "transformers GPT-2."),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(parser=o.integer("--sample", 0), metavar="INT", help="Tokens to write at the "
                     "end."),
    ] = 0,
    strict_profile: o.StrictProfile = False, device: o.Device = "auto",
    seed: Annotated[
        int | None, typer.Option(parser=o.integer("--seed", 0), metavar="INT", help="Seed (0).")
    ] = None,
    debug: o.Debug = False, version: o.Version = False,
) -> None:  # fmt: skip
    """Train GPT-2: `jetfire-train PRESET`. Ctrl-C writes a checkpoint; --resume goes on from it."""
    from jetfire.gpt2 import options

    o.strict(strict_profile)
    asked = options.TrainOptions(
        preset=preset, recipe=recipe, settings=set_ or (), steps=steps, data=data,
        output=output, resume=resume, init=init, device=device, seed=seed, sample=sample,
    )  # fmt: skip
    try:
        options.check(asked)
    except UsageError as error:
        if os.environ.get("RANK", "0") != "0":  # of torchrun's processes the first one says it
            raise typer.Exit(error.exit_code) from None
        raise
    from jetfire.gpt2 import command

    command.train(asked)
