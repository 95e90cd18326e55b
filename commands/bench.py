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
    op: o.Ops = None,
    m: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help=f"Rows: {o.SIZE}. (4096; on the CPU 512)"),
    ] = None,
    n: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Columns (as m).")] = None,
    k: Annotated[list[str] | None, typer.Option(metavar="SIZES", help="Inner size (as m).")] = None,
    workload: o.Workload = None, block: o.Blocks = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--mode"), metavar="fwd|bwd", help="Direction (fwd).",
                     autocompletion=o.completing(("fwd", "bwd"))),
    ] = None,
    set_: o.Setting = None, kernel: o.Kernels = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=V", help="Override a config field.")
    ] = None,
    peer: o.Peers = None, data: o.Data = "normal", device: o.Device = "auto",
    format_: o.Format = None, output: o.Rows = None, append: o.Append = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the rows: .png, .svg or .pdf.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=o.completing(o.SUITES),
            help="The committed measurements, instead of OP: results, or a part of it: targets, "
            "gemm, elementwise, int4; promotion; training; export.",
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List ops, kernels, workloads, peers; measure nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be measured.")
    ] = False,
    seed: o.Seed = 0,
    rounds: Annotated[
        int | None,
        typer.Option(parser=o.integer("--rounds", 1), metavar="INT",
                     help="Samples a row (20; on the CPU 7)."),
    ] = None,
    remeasure_peaks: Annotated[
        bool, typer.Option("--remeasure-peaks", help="Measure the device's peaks anew.")
    ] = False,
    strict_profile: o.StrictProfile = False, debug: o.Debug = False, version: o.Version = False,
) -> None:  # fmt: skip
    """Check every kernel of an op, then time it against its peers."""
    from jetfire.bench import command

    o.strict(strict_profile)
    if list_:
        print(command.listing())
        return
    asked = command.BenchOptions(
        ops=op or (), m=o.joined(m), n=o.joined(n), k=o.joined(k), workload=workload,
        block=block or (), mode=tuple(mode or ("fwd",)), settings=set_ or (), kernels=kernel or (),
        config=config or (), peers=peer or (), data=data, device=device, format=format_,
        output=output, append=append, plot=plot, dry_run=dry_run, seed=seed, rounds=rounds,
        remeasure_peaks=remeasure_peaks, suite=suite, debug=debug,
    )  # fmt: skip
    if suite == "training":
        from jetfire.gpt2 import bench as training

        training.suite(asked)
        return
    if suite == "export":
        from jetfire.export import suite as exports

        exports.suite(asked)
        return
    command.bench(asked)
