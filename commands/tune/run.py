"""`jetfire tune` without a verb."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands import problems
from jetfire.commands.base import RUN, OwnCommand
from jetfire.core.errors import UsageError

app = typer.Typer()


@app.command(RUN, cls=OwnCommand, hidden=True)
def _tune(
    op: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP...", autocompletion=o.completing(o.OPS, ("show",)),
            help="Ops by name, or [b]all[/b]; or [b]show[/b] [OP...]: list the profiles.",
        ),
    ] = None,
    m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None, workload: o.Workload = None,
    block: o.Blocks = None, mode: o.Mode = "fwd", set_: o.Setting = None, kernel: o.Kernels = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every problem that profiles are shipped for.")
    ] = False,
    unseen: Annotated[
        int | None,
        typer.Option(parser=o.integer("--unseen", 1), metavar="N", help="Tune N random shapes that "
                     "no profile is for, keep nothing, and say how far off the profiles are."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="--unseen: its rows.")
    ] = None,
    missing: o.Missing = False, shard: o.Shard = None, trials: o.Trials = None,
    budget: o.Budget = "10m",
    effort: Annotated[
        str,
        typer.Option(metavar="NAME", help="quick (40 configs) or full (250).",
                     autocompletion=o.completing(o.EFFORTS)),
    ] = "quick",
    strategy: o.Strategy = "tpe",
    objective: Annotated[
        str,
        typer.Option(metavar="NAME", help="time, energy or both.",
                     autocompletion=o.completing(o.OBJECTIVES)),
    ] = "time",
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=V,...", help="Search only these values of a config field."),
    ] = None,
    peer: o.Peers = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE|DIR", help="Where studies are kept: a database's URL "
                     "(sqlite:///…, postgresql://…), FILE.journal or a folder (JETFIRE_STUDIES)."),
    ] = None,
    trial_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="What a config may take to be checked and timed.")
    ] = "30s",
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the searches as a page.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE.json.gz", help="Keep the trials for --replay.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json.gz", help="Search recorded trials; no device, no profile."),
    ] = None,
    data: o.Data = "normal", device: o.Device = "auto", seed: o.Seed = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched.")
    ] = False,
    debug: o.Debug = False, version: o.Version = False,
) -> None:  # fmt: skip
    """Search tile sizes on this device; the best are kept as a profile that bench and nn load.

    Every trial is durable: after an interruption the same command goes on where it was.
    """
    from jetfire.measure import plan
    from jetfire.tuner import options

    if "show" in (op or ()):
        raise UsageError(f"tune {' '.join(op or ())}: expected show first: jetfire tune show OP")
    peers = plan.parse_list(peer or [])
    asked = options.TuneOptions(
        cases=(), kernels=plan.parse_list(kernel or []), device=device,
        budget_s=o.duration("--budget", budget), trials=trials, effort=effort,
        strategy=strategy, objective=objective, seed=seed, data=data,
        space=plan.parse_settings("--space", space or []), storage=storage,
        trial_s=o.duration("--trial-timeout", trial_timeout),
        peers=[] if peers == ["none"] else (peers or None), report=report, record=record,
        missing=missing, shard=o.shard(shard), dry_run=dry_run, unseen=unseen or 0, output=output,
        keep=not unseen,
    )  # fmt: skip
    options.check(asked)
    if output is not None and not unseen:
        raise UsageError(f"-o {output}: expected --unseen N, whose rows it holds")
    if replay is not None:
        if op:
            raise UsageError(f"--replay {replay}: it says itself of which op it is: leave out OP")
        from jetfire.tuner import command

        print(command.replay(replay, strategy, trials, seed))
        return
    shipped = all_ or unseen
    if shipped:
        other = all_ or block or kernel or missing or shard or space
        if m or n or k or workload or set_ or mode != "fwd" or (unseen and other):
            what = "--unseen: only OP narrows" if unseen else "--all: only OP and --block narrow"
            raise UsageError(f"{what} its problems")
    ops = op or (["all"] if shipped else None)
    request = problems.request(ops, m, n, k, workload, block, mode, set_, asked.kernels)
    from jetfire.core.device import Device
    from jetfire.tuner import command

    if shipped:
        from jetfire.tuner.shipped import cases as shipped_cases

        cases = shipped_cases(request.ops, request.blocks or ())
        if not cases:
            names = ", ".join(request.ops)
            raise UsageError(f"{names}: has nothing to tune: it launches the kernels of other ops")
    else:
        cases = problems.cases(request, 4096 if Device.parse(device).kind == "cuda" else 256)
    command.tune(dataclasses.replace(asked, cases=cases))
