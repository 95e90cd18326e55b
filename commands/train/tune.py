"""`jetfire train tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(name="tune", cls=Command)
def _tune_training(
    preset: o.Preset,
    recipe: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--recipe"), metavar="NAME,...",
                     help="As for training, but bf16 (int8).",
                     autocompletion=o.completing(o.MEASURED)),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=V,...", help="As for training.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="As for training; its vocabulary alone matters.",
                     autocompletion=o.completing(o.CORPORA)),
    ] = None,
    budget: o.Budget = "10m", trials: o.Trials = None, missing: o.Missing = False,
    shard: o.Shard = None, strategy: o.Strategy = "tpe", peer: o.Peers = None,
    device: o.Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Tune every kernel that a training step calls, for its shapes, as `jetfire tune` does."""
    from jetfire.gpt2.cases import runs_of
    from jetfire.measure import plan
    from jetfire.tuner import options

    peers = plan.parse_list(peer or [])
    asked = options.TuneOptions(
        cases=(), kernels=(), device=device, budget_s=o.duration("--budget", budget), trials=trials,
        strategy=strategy, peers=[] if peers == ["none"] else (peers or None), missing=missing,
        shard=o.shard(shard), dry_run=dry_run,
    )  # fmt: skip
    options.check(asked)
    runs = runs_of(preset, plan.parse_list(recipe or []), set_ or (), data)
    from jetfire.gpt2 import tuning

    tuning.run(asked, runs)
