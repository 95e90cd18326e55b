"""`jetfire advise`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire advise hf:gpt2-350m --set batch=16 --format json"


def run(
    model: Annotated[
        str,
        o.argument(
            "MODEL",
            "hf:NAME, a transformers config.json, MODULE:FUNCTION (which is called), or a preset.",
            o.MODELS,
            o.PRESETS,
        ),
    ],
    recipes: Annotated[
        o.Texts,
        o.listed(
            "--recipe",
            "NAME,...",
            "Blocks to compare (int8-block32, -block64, -block128).",
            o.ADVISED,
        ),
    ] = None,
    settings: Annotated[
        o.Texts, o.option("--set", "KEY=V,...", "Sizes, as in train bench.")
    ] = None,
    data: Annotated[
        o.File, o.option("--data", "FOLDER", "Prepared tokens for the SQNR (random ones).")
    ] = None,
    sqnr: Annotated[bool, o.flag("--sqnr/--no-sqnr", "Compute the SQNR of the products.")] = True,
    least: Annotated[
        float,
        o.number(
            "--least-sqnr",
            "DB",
            "Keep a layer of which a product has less: 20 dB is an error of a tenth.",
        ),
    ] = 20.0,
    format: Annotated[
        str, o.choice("--format", "NAME", "table, json or csv.", ("table", "json", "csv"))
    ] = "table",
    device: o.Device = "auto",
    seed: o.Seed = 0,
    debug: o.Debug = False,
) -> None:
    """Say by layer what INT8 takes and loses beside BF16 and FP8, and what to convert."""
    from jetfire.models import options

    if not sqnr:
        useful = ("model", "recipes", "settings", "sqnr", "format", "device", "seed", "debug")
        o.alone(run, "--no-sqnr", locals(), *useful)
    asked = o.collect(options.AdviseOptions, locals())
    options.check(asked)
    from jetfire.models import advise

    advise.advise(asked)
