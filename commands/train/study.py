"""`jetfire train study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from jetfire.commands import options as o

EPILOG = (
    "Example: jetfire train study gpt2-124m --recipe bf16,int8 --seed 0,1,2,3 --steps 5000 "
    "--set batch=16,accumulate=1 --data tokens -o runs/study"
)


def run(
    preset: o.Preset,
    output: Annotated[
        Path,
        o.option(
            "--output -o",
            "FOLDER",
            "Of the runs, FOLDER/RECIPE-seedN: begun, gone on with, and compared.",
        ),
    ],
    recipes: Annotated[
        o.Texts,
        o.listed(
            "--recipe",
            "NAME,...",
            "As for training, or with an optimizer as int8+adamw8 (bf16,int8).",
            o.RECIPES,
        ),
    ] = None,
    seeds: Annotated[o.Texts, o.listed("--seed", "INT,...", "Seeds of each (0).")] = None,
    steps: o.Steps = None,
    data: Annotated[o.Text, o.option("--data", "NAME|PATH", "As for training.", o.CORPORA)] = None,
    settings: Annotated[
        o.Texts, o.option("--set", "KEY=V,...", "As for training, of all runs (order=shuffled).")
    ] = None,
    base: Annotated[
        o.Text,
        o.option("--base", "NAME", "The recipe that others are compared with (bf16).", o.RECIPES),
    ] = None,
    window: Annotated[
        o.Text,
        o.option(
            "--window", "FIRST:LAST", "The steps whose mean training loss counts (the last fifth)."
        ),
    ] = None,
    record: Annotated[
        o.File, o.option("--record", "FILE", "For the result, .json (FOLDER/study.json).")
    ] = None,
    jobs: Annotated[o.Count, o.integer("--jobs", "Runs at a time (one on each GPU).", 1)] = None,
    format: o.Format = None,
    strict_profile: o.StrictProfile = False,
    device: o.Device = "auto",
    debug: o.Debug = False,
) -> None:
    """Train recipes × seeds; compare losses, paired by seed. The same command again goes on."""
    from jetfire.gpt2.training import study

    numbers = list(map(o.parse_integer("--seed", 0), seeds)) if seeds else None
    asked = o.collect(study.StudyOptions, locals() | {"seeds": numbers})
    study.check(asked)
    study.study(asked)
