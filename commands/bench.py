"""`jetfire bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def bench(
    ops: o.Ops = None,
    m: Annotated[
        list[str] | None, o.option("--m", "SIZES", f"Rows: {o.SIZE}. (4096; on the CPU 512)")
    ] = None,
    n: Annotated[list[str] | None, o.option("--n", "SIZES", "Columns (as m).")] = None,
    k: Annotated[list[str] | None, o.option("--k", "SIZES", "Inner size (as m).")] = None,
    workload: o.Workload = None,
    block: o.Blocks = None,
    mode: Annotated[
        list[str] | None, o.listed("--mode", "fwd|bwd", "Direction (fwd).", ("fwd", "bwd"))
    ] = None,
    settings: o.Setting = None,
    kernels: o.Kernels = None,
    config: Annotated[
        list[str] | None, o.option("--config", "FIELD=V", "Override a config field.")
    ] = None,
    peers: o.Peers = None,
    data: o.Data = "normal",
    device: o.Device = "auto",
    format: o.Format = None,
    output: o.Rows = None,
    append: o.Append = False,
    plot: Annotated[
        Path | None, o.option("--plot", "FILE", "Draw the rows: .png, .svg or .pdf.")
    ] = None,
    suite: Annotated[
        str | None,
        o.option(
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
        int | None, o.integer("--rounds", "Samples a row (20; on the CPU 7).", 1)
    ] = None,
    remeasure_peaks: Annotated[
        bool, o.flag("--remeasure-peaks", "Measure the device's peaks anew.")
    ] = False,
    strict_profile: o.StrictProfile = False,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    asked = o.collect(command.BenchOptions, locals())
    if listing:
        print(command.listing())
    elif suite == "training":
        from jetfire.gpt2 import bench as training

        training.suite(asked)
    elif suite == "export":
        from jetfire.export import suite as exports

        exports.suite(asked)
    else:
        command.bench(asked)
