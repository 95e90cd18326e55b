"""`jetfire audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands import problems
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def audit(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    block: o.Blocks = None, mode: o.Mode = "fwd", set_: o.Setting = None, kernel: o.Kernels = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(parser=o.some("--arch"), metavar="SM,...",
                     help="Architectures (80,89,90,100).",
                     autocompletion=o.completing(o.ARCHITECTURES)),
    ] = None,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """Compile GPU kernels for any architecture; show registers, spills, instructions."""
    from jetfire.core.device import capability_of, target_device
    from jetfire.measure import plan

    names = plan.parse_list(kernel or [])
    wanted = plan.parse_list(arch or ["80,89,90,100"])
    targets = [target_device(capability_of(text)) for text in wanted]
    request = problems.request(op or ["all"], m, n, k, None, block, mode, set_, names)
    cases = problems.cases(request, 4096)
    from jetfire.bench import audit as auditor

    auditor.run(cases, names, targets)
