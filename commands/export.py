"""`jetfire export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands import problems
from jetfire.commands.base import Command
from jetfire.core.errors import UsageError

app = typer.Typer()


@app.command(cls=Command)
def export(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    workload: o.Workload = None, block: o.Blocks = None, mode: o.Mode = "fwd",
    set_: o.Setting = None,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU kernel (the fastest tuned one).",
                     autocompletion=o.complete_kernel),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda (source), cubin (compiled code in C), torch (a "
                     "PyTorch extension), wheel, or hf (Hugging Face's kernels); cuda for a CUDA "
                     "kernel, cubin for a Triton one.", autocompletion=o.completing(o.TARGETS)),
    ] = None,
    arch: Annotated[
        str,
        typer.Option(metavar="SM", help="Architecture, e.g. 9.0a.",
                     autocompletion=o.completing(o.ARCHITECTURES)),
    ] = "9.0a",
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of function, library and package "
                     "(jetfire_OP)."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Build and test what was written.")
    ] = True,
    debug: o.Debug = False, version: o.Version = False,
) -> None:  # fmt: skip
    """Write a tuned kernel that needs neither Jetfire nor its tools; build and test it."""
    from jetfire.core.device import capability_of
    from jetfire.export import options
    from jetfire.measure import plan

    if output is None:
        raise UsageError("export: expected -o DIR")
    asked = options.ExportOptions(
        cases=(),
        kernel=kernel,
        target=target,
        capability=capability_of(arch),
        folder=output,
        name=name,
        check=check,
    )
    chosen = plan.choose_ops(op or [])
    if len(chosen) > 1:
        raise UsageError(f"export takes one op, given {', '.join(one.name for one in chosen)}")
    options.check(asked)
    has_blocks = "block" in chosen[0].Problem.__dataclass_fields__
    blocks = block or (["32"] if has_blocks else None)
    request = problems.request(
        op, m, n, k, workload, blocks, mode, set_, [kernel] if kernel else []
    )
    cases = problems.cases(request, 4096)
    from jetfire.export import command

    command.run(dataclasses.replace(asked, cases=cases))
