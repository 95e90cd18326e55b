"""`jetfire export`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jetfire.commands import options as o
from jetfire.core import terminal
from jetfire.core.errors import UsageError

EPILOG = "Example: jetfire export gemm --m 4096 -o out"


def run(
    ops: o.Ops = None,
    m: o.M = None,
    n: o.N = None,
    k: o.K = None,
    workload: o.Workload = None,
    block: o.Blocks = None,
    mode: o.Mode = "fwd",
    settings: o.Setting = None,
    kernel: Annotated[
        o.Text,
        o.option(
            "--kernel", "NAME", "A GPU kernel (the fastest tuned one).", complete=o.complete_kernel
        ),
    ] = None,
    target: Annotated[
        o.Text,
        o.choice(
            "--target",
            "NAME",
            "cuda (source), cubin (compiled code in C), torch (a PyTorch extension), wheel, or hf "
            "(Hugging Face's kernels); cuda for a CUDA kernel, cubin for a Triton one.",
            o.TARGETS,
        ),
    ] = None,
    arch: Annotated[
        str, o.option("--arch", "SM", "Architecture, e.g. 9.0a.", o.ARCHITECTURES)
    ] = "9.0a",
    name: Annotated[
        o.Text, o.option("--name", "NAME", "Of function, library and package (jetfire_OP).")
    ] = None,
    folder: Annotated[o.File, o.option("--output -o", "DIR", "A new or empty folder.")] = None,
    check: Annotated[bool, o.flag("--check/--no-check", "Build and test what was written.")] = True,
    load: o.Load = None,
    debug: o.Debug = False,
    version: o.Version = False,
) -> None:
    """Write a tuned kernel that needs neither Jetfire nor its tools; build and test it."""
    from jetfire.core.device import capability_of, target_device
    from jetfire.export import options
    from jetfire.measure import plan

    if folder is None:
        raise UsageError("export: expected -o DIR")
    device = target_device(capability_of(arch))
    asked = o.collect(options.ExportOptions, locals(), device=device)
    chosen = plan.choose_ops(ops or [])
    if len(chosen) > 1:
        raise UsageError(f"export takes one op, given {', '.join(one.name for one in chosen)}")
    if block is None and "block" in chosen[0].Problem.__dataclass_fields__:
        block = ["32"]
    request = o.request(locals(), mode=[mode], kernels=[kernel] if kernel else [])
    cases = plan.cases(request.sized(4096), terminal.note)
    from jetfire.export import command

    command.run(dataclasses.replace(asked, cases=cases))
