"""`jetfire train study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(
    name="study",
    cls=Command,
    epilog="Example: jetfire train study gpt2-124m --recipe bf16,int8 --seed 0,1,2,3 --steps 5000 "
    "--set batch=16,accumulate=1 --data tokens -o runs/study",
)
def _study(
    preset: o.Preset,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Of the runs, FOLDER/RECIPE-seedN: "
                     "begun, gone on with, and compared."),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training (bf16,int8).", autocompletion=o.completing(o.RECIPES)),
    ] = None,
    seed: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--seed"), metavar="INT,...", help="Seeds of each (0)."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=o.integer("--steps", 1), metavar="INT", help="Optimizer steps."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="As for training.",
                     autocompletion=o.completing(o.CORPORA)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="As for training, of all runs "
                     "(order=shuffled)."),
    ] = None,
    base: Annotated[
        str,
        typer.Option(metavar="NAME", help="The recipe that others are compared with.",
                     autocompletion=o.completing(o.RECIPES)),
    ] = "bf16",
    window: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="The steps whose mean training loss counts (the "
                     "last fifth)."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For the result, .json (FOLDER/study.json)."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(parser=o.integer("--jobs", 1), metavar="INT", help="Runs at a time (one on "
                     "each GPU)."),
    ] = None,
    strict_profile: o.StrictProfile = False, device: o.Device = "auto", debug: o.Debug = False,
) -> None:  # fmt: skip
    """Train recipes × seeds; compare losses, paired by seed. The same command again goes on."""
    from jetfire.gpt2 import study
    from jetfire.measure import plan

    number = o.integer("--seed", 0)
    seeds = [number(text) for text in plan.parse_list(seed or ["0"])]
    asked = study.StudyOptions(
        preset=preset, output=output, recipes=plan.parse_list(recipe or ["bf16,int8"]),
        seeds=list(dict.fromkeys(seeds)), settings=set_ or (), steps=steps, data=data,
        device=device, jobs=jobs, base=base, window=window, record=record,
        strict_profile=strict_profile,
    )  # fmt: skip
    study.check(asked)
    study.study(asked)
