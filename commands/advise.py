"""`jetfire advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(
    cls=Command,
    epilog="Example: jetfire advise hf:gpt2-350m --set batch=16 --format json",
)
def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="hf:NAME, a transformers config.json, MODULE:FUNCTION (which is called), or a "
            "preset.",
            autocompletion=o.completing(o.MODELS, o.PRESETS),
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            parser=o.some("--recipe"),
            metavar="NAME,...",
            help="Blocks to compare (int8-block32, -block64, -block128).",
            autocompletion=o.completing(o.ADVISED),
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="Sizes, as in train bench."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Prepared tokens for the SQNR (random ones)."),
    ] = None,
    sqnr: Annotated[
        bool, typer.Option("--sqnr/--no-sqnr", help="Compute the SQNR of the products.")
    ] = True,
    least: Annotated[
        float,
        typer.Option(
            "--least-sqnr",
            parser=o.number("--least-sqnr"),
            metavar="DB",
            help="Keep a layer of which a product has less: 20 dB is an error of a tenth.",
        ),
    ] = 20.0,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="table, json or csv.",
            autocompletion=o.completing(("table", "json", "csv")),
        ),
    ] = "table",
    device: o.Device = "auto",
    seed: o.Seed = 0,
    debug: o.Debug = False,
) -> None:
    """Say by layer what INT8 takes and loses beside BF16 and FP8, and what to convert."""
    from jetfire.measure import plan
    from jetfire.models import options

    asked = options.AdviseOptions(
        model=model,
        settings=set_ or (),
        recipes=list(dict.fromkeys(plan.parse_list(recipe or []))) or options.RECIPES,
        data=data,
        sqnr=sqnr,
        least=least,
        format=format_,
        device=device,
        seed=seed,
        debug=debug,
    )
    options.check(asked)
    from jetfire.models.advise import advise as advise_on

    advise_on(asked)
