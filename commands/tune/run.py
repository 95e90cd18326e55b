"""`jetfire tune` without a verb."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import UsageError

EPILOG = "Example: jetfire tune gemm --m 4096 --budget 5m"


def run(
    ops: Annotated[
        o.Texts,
        o.argument(
            "OP...",
            "Ops by name, or [b]all[/b]; or [b]show[/b] [OP...]: list the profiles.",
            complete=o.or_verb(o.OPS),
        ),
    ] = None,
    m: o.M = None,
    n: o.N = None,
    k: o.K = None,
    workload: o.Workload = None,
    block: o.Blocks = None,
    mode: o.Mode = "fwd",
    settings: o.Setting = None,
    kernels: o.Kernels = None,
    shipped: Annotated[
        bool, o.flag("--all", "Every problem that profiles are shipped for.")
    ] = False,
    unseen: Annotated[
        o.Count,
        o.integer(
            "--unseen",
            "Tune N random shapes that no profile is for, keep nothing, and say how far off the "
            "profiles are.",
            1,
            metavar="N",
        ),
    ] = None,
    output: Annotated[o.File, o.option("--output -o", "FILE.json", "--unseen: its rows.")] = None,
    missing: o.Missing = False,
    shard: o.Shard = None,
    trials: o.Trials = None,
    budget: o.Budget = "10m",
    effort: Annotated[
        str, o.choice("--effort", "NAME", "quick (40 configs) or full (250).", o.EFFORTS)
    ] = "quick",
    strategy: o.Strategy = "tpe",
    objective: Annotated[
        str, o.choice("--objective", "NAME", "time, energy or both.", o.OBJECTIVES)
    ] = "time",
    for_all: Annotated[
        o.Text,
        o.choice(
            "--for-all",
            "mean|worst",
            "One config for all problems of a kernel: the least geometric mean of its times over "
            "each problem's best, or the least worst case.",
            o.FOR_ALL,
        ),
    ] = None,
    bits: Annotated[
        o.Text,
        o.choice(
            "--bits",
            "same",
            "Only configs whose output is bit-equal to that of the config in use.",
            o.BITS,
        ),
    ] = None,
    max_noise: Annotated[
        o.Text,
        o.option(
            "--max-noise",
            "P%",
            "Time a config until the confidence interval of its time is within so much of it, or "
            "for 1000 samples.",
        ),
    ] = None,
    space: Annotated[
        o.Texts, o.option("--space", "FIELD=V,...", "Search only these values of a config field.")
    ] = None,
    peers: o.Peers = None,
    profile: o.Profile = None,
    storage: Annotated[
        o.Text,
        o.option(
            "--storage",
            "URL|FILE|DIR",
            "Where studies are kept: a database's URL (sqlite:///…, postgresql://…), FILE.journal "
            "or a folder (JETFIRE_STUDIES).",
        ),
    ] = None,
    trial_timeout: Annotated[
        str, o.option("--trial-timeout", "TIME", "What a config may take to be checked and timed.")
    ] = "30s",
    report: Annotated[
        o.File, o.option("--report", "FILE.html", "Write the searches as a page.")
    ] = None,
    record: Annotated[
        o.File,
        o.option(
            "--record",
            "FILE.json.gz",
            "Keep the trials, or those of --replay, for --replay; as T4 in FILE.t4.json.gz.",
        ),
    ] = None,
    replay: Annotated[
        o.File,
        o.option(
            "--replay",
            "FILE.json.gz",
            "Search recorded trials, Kernel Tuner's cache or T4; no device, no profile.",
        ),
    ] = None,
    data: o.Data = "normal",
    device: o.Device = "auto",
    seed: o.Seed = 0,
    format: o.Format = None,
    dry_run: o.DryTune = False,
    load: o.Load = None,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Search tile sizes on this device; the best are kept as a profile that bench and nn load.

    Every trial is durable: after an interruption the same command goes on where it was.
    """
    if replay is not None:
        useful = ("replay", "ops", "strategy", "trials", "seed", "record", "profile", "load")
        o.alone(run, f"--replay {replay}", locals(), *useful)
    from jetfire.core.device import Device
    from jetfire.measure import plan
    from jetfire.tuner import options

    if "show" in (ops or ()):
        raise UsageError(f"tune {' '.join(ops or ())}: expected show first: jetfire tune show OP")
    if replay is not None and profile is not None:
        raise UsageError(f"--replay {replay}: nothing runs: leave out --profile")
    asked = o.collect(
        options.TuneOptions,
        locals(),
        budget_s=o.duration("--budget", budget),
        trial_s=o.duration("--trial-timeout", trial_timeout),
        space=plan.parse_settings("--space", space or []),
        peers=plan.kept_peers(peers),
        shard=o.shard(shard),
        max_noise=None if max_noise is None else _noise(max_noise),
        keep=not unseen,
    )
    if output is not None and not unseen:
        raise UsageError(f"-o {output}: expected --unseen N, whose rows it holds")
    if replay is not None:
        if ops:
            raise UsageError(f"--replay {replay}: it says itself of which op it is: leave out OP")
        from jetfire.tuner import command

        found = command.replay(replay, strategy, trials, seed, record)
        terminal.result({"replay": found}, lambda: print(found))
        return
    if shipped or unseen:
        other = shipped or block or kernels or missing or shard or space
        if m or n or k or workload or settings or mode != "fwd" or (unseen and other):
            what = "--unseen: only OP narrows" if unseen else "--all: only OP and --block narrow"
            raise UsageError(f"{what} its problems")
        ops = ops or ["all"]
    request = o.request(locals(), mode=[mode])
    from jetfire.tuner import command, problems

    if not (shipped or unseen):
        size = 256 if Device.parse(device).kind == "cpu" else 4096
        cases = plan.cases(request.sized(size), terminal.note)
    elif not (cases := problems.cases([op.name for op in request.ops], request.blocks or ())):
        names = ", ".join(op.name for op in request.ops)
        raise UsageError(f"{names}: has nothing to tune: it launches the kernels of other ops")
    command.tune(dataclasses.replace(asked, cases=cases))


def _noise(text: str) -> float:
    """Return the share that --max-noise gives.

    Raises:
        UsageError: it is none above 0 and below 100%.
    """
    from jetfire.bench.compare import parse_share

    share = parse_share(text, "--max-noise")
    if not 0 < share < 1:
        raise UsageError(f"--max-noise {text}: expected a share above 0 and below 100%")
    return share
