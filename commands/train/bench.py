"""`jetfire train bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(name="bench", cls=Command)
def _bench_training(
    case: Annotated[
        str,
        typer.Argument(metavar="CASE", help="block, wide (4 layers of width 4096), a preset, "
                       "hf:NAME, a transformers config.json, or MODULE:FUNCTION.",
                       autocompletion=o.completing(o.CASES, o.MODELS)),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training, but bf16 (the INT8 ones).",
                     autocompletion=o.completing(o.MEASURED)),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V,...", help="layers, heads, width, batch, context, "
                     "vocabulary, accumulate; of hf: kv_heads, hidden and run too."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--peer"), metavar="NAME",
                     help="Only these beside eager: compile, fp8_tensorwise, fp8_rowwise, …",
                     autocompletion=o.completing(o.STEP_PEERS)),
    ] = None,
    device: o.Device = "auto", format_: o.Format = None, output: o.Rows = None,
    append: o.Append = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--rounds", 1), metavar="INT", help="Samples a row (12; on the CPU 5)."
        ),
    ] = None,
    strict_profile: o.StrictProfile = False, seed: o.Seed = 0, debug: o.Debug = False,
) -> None:  # fmt: skip
    """Time training steps against BF16 eager and torch.compile; measure their memory."""
    from jetfire.bench import command
    from jetfire.core import device as devices
    from jetfire.gpt2 import cases, settings
    from jetfire.models import cases as models
    from jetfire.models import sources

    o.strict(strict_profile)
    devices.check_name(device)
    asked = command.BenchOptions(
        ops=(), settings=set_ or (), peers=peer or (), device=device, format=format_,
        output=output, append=append, dry_run=dry_run, rounds=rounds, seed=seed, debug=debug,
    )  # fmt: skip
    command.file_format(asked)
    if sources.named_here(case):
        models.check(case, asked.settings, recipe or (), asked.peers)
        from jetfire.models import bench as others

        others.bench(asked, case, recipe or ())
        return
    cases.problem_of(case, settings.split(asked.settings))
    cases.recipes_of(recipe or ())
    cases.peers_of(asked.peers)
    from jetfire.gpt2 import bench as training

    training.bench(asked, case, recipe or ())
