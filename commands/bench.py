"""`jetfire bench`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o

EPILOG = "Example: jetfire bench gemm --m 4096 --block 32 -o gemm.json"


def run(
    ops: o.Ops = None,
    m: Annotated[
        o.Texts, o.option("--m", "SIZES", f"Rows: {o.SIZE}. (4096; on the CPU 512)")
    ] = None,
    n: Annotated[o.Texts, o.option("--n", "SIZES", "Columns (as m).")] = None,
    k: Annotated[o.Texts, o.option("--k", "SIZES", "Inner size (as m).")] = None,
    workload: o.Workload = None,
    block: o.Blocks = None,
    mode: Annotated[
        o.Texts, o.listed("--mode", "fwd|bwd", "Direction (fwd).", ("fwd", "bwd"))
    ] = None,
    settings: o.Setting = None,
    kernels: o.Kernels = None,
    config: Annotated[o.Texts, o.option("--config", "FIELD=V", "Override a config field.")] = None,
    peers: o.Peers = None,
    data: o.Data = "normal",
    device: o.Device = "auto",
    format: o.Format = None,
    output: o.Rows = None,
    append: o.Append = False,
    plot: Annotated[
        o.File, o.option("--plot", "FILE", "Draw the rows: .png, .svg or .pdf.")
    ] = None,
    suite: Annotated[
        o.Text,
        o.choice(
            "--suite",
            "NAME",
            "The committed measurements, instead of OP: results, or a part of it: targets, "
            "gemm, elementwise, int4; promotion; training; export.",
            o.SUITES,
        ),
    ] = None,
    listing: Annotated[
        bool, o.flag("--list", "List ops, kernels, workloads, peers; measure nothing.")
    ] = False,
    dry_run: o.DryBench = False,
    seed: o.Seed = 0,
    rounds: Annotated[
        o.Count, o.integer("--rounds", "Samples a row (20; on the CPU 7).", 1)
    ] = None,
    profile: o.Profile = None,
    profile_run: Annotated[
        bool,
        o.flag(
            "--profile-run",
            "Check each kernel and run it once, in an NVTX range, for a profiler around it.",
        ),
    ] = False,
    remeasure_peaks: Annotated[
        bool, o.flag("--remeasure-peaks", "Measure the device's peaks anew.")
    ] = False,
    strict_profile: o.StrictProfile = False,
    load: o.Load = None,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    asked = o.collect(command.BenchOptions, locals())
    if listing:
        from jetfire.bench import catalogue

        catalogue.show()
    elif suite == "training":
        from jetfire.gpt2.bench import steps as training

        training.suite(asked)
    elif suite == "export":
        from jetfire.export import suite as exports

        exports.suite(asked)
    else:
        command.bench(asked)
