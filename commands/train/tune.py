"""`jetfire train tune`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train tune gpt2-124m --data tokens --missing"


def run(
    preset: o.Preset,
    recipes: Annotated[
        o.Texts, o.listed("--recipe", "NAME,...", "As for training, but bf16 (int8).", o.MEASURED)
    ] = None,
    settings: Annotated[o.Texts, o.option("--set", "KEY=V,...", "As for training.")] = None,
    corpus: Annotated[  # TuneOptions.data is the inputs' distribution
        o.Text,
        o.option(
            "--data", "NAME|PATH", "As for training; its vocabulary alone matters.", o.CORPORA
        ),
    ] = None,
    budget: o.Budget = "10m",
    trials: o.Trials = None,
    missing: o.Missing = False,
    shard: o.Shard = None,
    strategy: o.Strategy = "tpe",
    peers: o.Peers = None,
    device: o.Device = "auto",
    dry_run: o.DryTune = False,
    debug: o.Debug = False,
) -> None:
    """Tune every kernel that a training step calls, for its shapes, as `jetfire tune` does."""
    from jetfire.gpt2.cases import runs_of
    from jetfire.measure import plan
    from jetfire.tuner import options

    asked = o.collect(
        options.TuneOptions,
        locals(),
        budget_s=o.duration("--budget", budget),
        peers=plan.kept_peers(peers),
        shard=o.shard(shard),
    )
    options.check(asked)
    runs = runs_of(preset, recipes or (), settings or (), corpus)
    from jetfire.gpt2 import tuning

    tuning.run(asked, runs)
