"""`jetfire train` without a verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jetfire.commands import options as o
from jetfire.commands.base import FILE, OwnCommand
from jetfire.core import environment
from jetfire.core.errors import UsageError

EPILOG = (
    "Other verbs, each with --help: jetfire train prepare (text to tokens), study (recipes "
    "× seeds, paired), plot (loss curves), sample (text of a run's model), export (weights for "
    "transformers), bench (a step against BF16), tune (the kernels of a step), plan (memory)."
)

# Options that `plan` has too.
Recipe = Annotated[
    o.Text,
    o.option(
        "--recipe",
        "NAME",
        "bf16, int8, int8-block32, -block64, -block128, -kept4, -fallback, int4-hq-lss, "
        "int4-hq-bs, int4-hq, int4-naive (int8).",
        o.RECIPES,
    ),
]
Settings = Annotated[o.Texts, o.option("--set", "KEY=V,...", "Any other setting: batch, rate, …")]
Data = Annotated[
    o.Text,
    o.option(
        "--data",
        "NAME|PATH",
        "python, shakespeare, shakespeare-char, openwebtext; a prepared folder; a text file.",
        o.CORPORA,
    ),
]


class RunCommand(OwnCommand):
    """`jetfire train`, which takes another run's settings.json for a file of options, too."""

    def table(self, file: Path) -> dict[str, Any]:
        if file.suffix != ".json":
            return super().table(file)
        from jetfire.gpt2.training import options

        return options.of_run(file)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        file, _ = ctx.meta.get(FILE, (None, ()))
        if file is not None and file.suffix == ".json":
            from jetfire.gpt2.training import options

            options.check_preset(ctx.params["preset"], file)
        return rest


COMMAND = RunCommand


def run(
    preset: Annotated[
        o.Text,
        o.argument(
            "PRESET",
            "tiny, shakespeare-char, gpt2-124m, -350m, -774m, -1558m; tiny-llama, llama-160m, -1b.",
            complete=o.or_verb(o.PRESETS),
        ),
    ] = None,
    recipe: Recipe = None,
    settings: Settings = None,
    steps: o.Steps = None,
    data: Data = None,
    output: Annotated[
        o.File,
        o.option(
            "--output -o", "RUN", "Folder of the run's log and checkpoints (runs/PRESET-RECIPE)."
        ),
    ] = None,
    resume: Annotated[
        bool, o.flag("--resume", "Go on with -o RUN from its last checkpoint.")
    ] = False,
    init: Annotated[
        o.File,
        o.option(
            "--init",
            "FOLDER",
            "Begin with the weights of a run, a checkpoint, or of transformers' GPT-2 or Llama.",
        ),
    ] = None,
    watch: Annotated[
        o.Count,
        o.integer(
            "--watch", "Log what INT8 does to each layer, every so many steps (0: never).", 0
        ),
    ] = None,
    loggers: Annotated[
        o.Texts,
        o.listed(
            "--logger", "NAME", "Log to tensorboard or wandb (Weights & Biases), too.", o.LOGGERS
        ),
    ] = None,
    sample: Annotated[int, o.integer("--sample", "Tokens to write at the end.", 0)] = 0,
    strict_profile: o.StrictProfile = False,
    device: o.Device = "auto",
    seed: Annotated[o.Count, o.integer("--seed", "Seed (0).", 0)] = None,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Train GPT-2 or Llama. Ctrl-C writes a checkpoint; --resume goes on from it."""
    from jetfire.gpt2.training import options

    try:
        asked = options.request_of(o.collect(options.TrainOptions, locals()))
    except UsageError as error:
        if not environment.leads():  # of torchrun's processes the first one says it
            raise typer.Exit(error.exit_code) from None
        raise
    from jetfire.gpt2.training import command

    folder = command.train(asked)
    if sample and environment.leads():
        command.sample(folder, "", sample, device=device)
