"""`jetfire fuzz`."""

from __future__ import annotations

import os
from typing import Annotated

from jetfire.commands import options as o
from jetfire.core.errors import UsageError

EPILOG = "Example: jetfire fuzz quantize gemm --examples 500"


def run(
    ops: o.Ops = None,
    kernels: o.Kernels = None,
    against: Annotated[
        o.Text,
        o.option(
            "--against", "KERNEL", "Compare the kernels with this one.", complete=o.complete_kernel
        ),
    ] = None,
    examples: Annotated[
        o.Count, o.integer("--examples", "Of each kernel (200; on the CPU 500, interpreted 60).", 1)
    ] = None,
    budget: Annotated[
        o.Text, o.option("--budget", "TIME", "Wall-clock time in all: 90, 90s, 10m, 1h. (30m)")
    ] = None,
    largest: Annotated[
        o.Count,
        o.integer("--largest", "Largest size drawn (2048; on the CPU 400, interpreted 130).", 1),
    ] = None,
    jobs: Annotated[
        o.Count,
        o.integer(
            "--jobs",
            "Processes that run cases (8 a GPU, at most one for two cores; on the CPU 1).",
            1,
        ),
    ] = None,
    reproduce: Annotated[
        o.Text, o.option("--reproduce", "ID", "Run a saved failure again: its ID, or a file.")
    ] = None,
    load: o.Load = None,
    sanitizer: Annotated[
        o.Text,
        o.choice(
            "--sanitizer",
            "TOOL",
            "compute-sanitizer's memcheck, racecheck, initcheck or synccheck, or Triton's consan.",
            o.SANITIZERS,
        ),
    ] = None,
    device: o.Device = "auto",
    interpreter: Annotated[
        bool, o.flag("--interpreter", "Triton kernels on the CPU, interpreted.")
    ] = False,
    format: o.Format = None,
    output: Annotated[o.File, o.option("--output -o", "FILE.json", "Save as JSON.")] = None,
    seed: o.Seed = 0,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Random problems, configs, values and layouts against the reference; failures are saved."""
    if reproduce is not None:
        useful = ("reproduce", "ops", "load", "sanitizer", "device", "interpreter")
        o.alone(run, f"--reproduce {reproduce}", locals(), *useful)
    from jetfire.core import registry
    from jetfire.measure import plan

    chosen = plan.choose_ops(ops or ["all"])
    registry.check_kernels(chosen, [*(kernels or ()), *([against] if against else [])])
    budget_s = None if budget is None else o.duration("--budget", budget)
    if interpreter and device not in ("auto", "cpu"):
        raise UsageError(f"--interpreter --device {device}: expected cpu, where it interprets")
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
    from jetfire.fuzz import command

    named = [op.name for op in chosen] if ops else ()
    if reproduce is not None:
        command.reproduce(reproduce, device, bool(load), sanitizer, named)
        return
    command.fuzz(o.collect(command.FuzzOptions, locals(), ops=named))
