"""`jetfire train tune`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire train tune gpt2-124m --data tokens --missing"


def run(
    case: Annotated[
        str,
        o.argument("CASE", "As for train bench.", o.CASES, o.MODELS),
    ],
    recipes: Annotated[
        o.Texts, o.listed("--recipe", "NAME,...", "As for training, but bf16 (int8).", o.MEASURED)
    ] = None,
    settings: Annotated[
        o.Texts,
        o.option("--set", "KEY=V,...", "Of a preset as for training, else as for train bench."),
    ] = None,
    corpus: Annotated[  # TuneOptions.data is the inputs' distribution
        o.Text,
        o.option(
            "--data", "NAME|PATH", "As for training; its vocabulary alone matters.", o.CORPORA
        ),
    ] = None,
    kernels: Annotated[
        o.Texts,
        o.listed(
            "--kernel",
            "NAME",
            "These, where they take the step's problems; its own only where untuned.",
            complete=o.complete_kernel,
        ),
    ] = None,
    budget: o.Budget = "10m",
    trials: o.Trials = None,
    missing: o.Missing = False,
    shard: o.Shard = None,
    strategy: o.Strategy = "tpe",
    peers: o.Peers = None,
    device: o.Device = "auto",
    format: o.Format = None,
    dry_run: o.DryTune = False,
    debug: o.Debug = False,
) -> None:
    """Tune every kernel that a training step calls, for its shapes, as `jetfire tune` does."""
    from jetfire.core import registry
    from jetfire.gpt2.bench.cases import case_of, runs_of
    from jetfire.gpt2.training.settings import PRESETS, split
    from jetfire.measure import plan
    from jetfire.models import cases as models
    from jetfire.models import sources
    from jetfire.tuner import options

    asked = o.collect(
        options.TuneOptions,
        locals(),
        budget_s=o.duration("--budget", budget),
        peers=plan.kept_peers(peers),
        shard=o.shard(shard),
    )
    registry.check_kernels(map(registry.get, registry.names()), asked.kernels)
    if case in PRESETS:
        runs = runs_of(case, recipes or (), settings or (), corpus)
        from jetfire.gpt2.bench import tuning

        tuning.run(asked, runs)
    elif sources.named_here(case):
        models.check(case, settings or (), recipes or ())
        _without_data(case, corpus)
        from jetfire.models import tuning as others

        others.run(asked, case, settings or (), recipes or ())
    else:
        measured = case_of(case, split(settings or ()), recipes or ("int8",))
        _without_data(case, corpus)
        from jetfire.gpt2.bench import tuning

        tuning.run_case(asked, measured)


def _without_data(case: str, corpus: str | None) -> None:
    """Raise UsageError where data are named, of which only a preset takes its vocabulary."""
    from jetfire.core.errors import UsageError

    if corpus is not None:
        raise UsageError(f"--data {corpus}: {case} has a vocabulary of its own")
