"""`jetfire fuzz`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands.base import Command
from jetfire.core.errors import UsageError

app = typer.Typer()


@app.command(cls=Command)
def fuzz(
    op: o.Ops = None, kernel: o.Kernels = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="KERNEL", help="Compare the kernels with this one.",
                     autocompletion=o.complete_kernel),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--examples", 1), metavar="INT",
            help="Of each kernel (200; on the CPU 500, interpreted 60).",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wall-clock time in all: 90, 90s, 10m, 1h. (30m)"),
    ] = None,
    largest: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--largest", 1), metavar="INT",
            help="Largest size drawn (2048; on the CPU 400, interpreted 130).",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            parser=o.integer("--jobs", 1), metavar="INT",
            help="Processes that run cases (8 a GPU, at most one for two cores; on the CPU 1).",
        ),
    ] = None,
    reproduce: Annotated[
        str | None, typer.Option(metavar="ID", help="Run a saved failure again: its ID, or a file.")
    ] = None,
    load: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Python whose KERNELS join those of their ops."),
    ] = None,
    sanitizer: Annotated[
        str | None,
        typer.Option(
            parser=o.choice("--sanitizer", lambda: o.SANITIZERS), metavar="TOOL",
            autocompletion=o.completing(o.SANITIZERS),
            help="Under compute-sanitizer: memcheck, racecheck, initcheck or synccheck.",
        ),
    ] = None,
    device: o.Device = "auto",
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="Triton kernels on the CPU, interpreted.")
    ] = False,
    format_: Annotated[
        str,
        typer.Option("--format", parser=o.choice("--format", lambda: ("table", "json")),
                     metavar="NAME", help="table or json.",
                     autocompletion=o.completing(("table", "json"))),
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as JSON.")
    ] = None,
    seed: o.Seed = 0, debug: o.Debug = False, version: o.Version = False,
) -> None:  # fmt: skip
    """Random problems, configs, values and layouts against the reference; failures are saved."""
    from jetfire.core import device as devices
    from jetfire.measure import plan

    devices.check_name(device)
    chosen = [found.name for found in plan.choose_ops(op or ["all"])]
    kernels = plan.parse_list(kernel or [])
    if not load:  # or it may bring them
        plan.check_kernels(chosen, [*kernels, *([against] if against else [])])
    budget_s = None if budget is None else o.duration("--budget", budget)
    if interpreter and device not in ("auto", "cpu"):
        raise UsageError(f"--interpreter --device {device}: expected cpu, where it interprets")
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
    from jetfire.fuzz import command

    if reproduce is not None:
        command.reproduce(reproduce, device, load or (), sanitizer)
        return
    command.fuzz(
        command.FuzzOptions(
            ops=chosen if op else (), kernels=kernels, against=against,
            examples=examples, largest=largest, seed=seed, budget_s=budget_s, jobs=jobs,
            device=device, load=load or (), sanitizer=sanitizer, format=format_, output=output,
        )
    )  # fmt: skip
