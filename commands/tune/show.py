"""`jetfire tune show`."""

from __future__ import annotations

from typing import Annotated

import typer

from jetfire.commands import options as o
from jetfire.commands import problems
from jetfire.commands.base import Command

app = typer.Typer()


@app.command(cls=Command)
def show(
    op: o.Ops = None, m: o.Sizes = None, n: o.Sizes = None, k: o.Sizes = None,
    workload: o.Workload = None, block: o.Blocks = None, set_: o.Setting = None,
    kernel: o.Kernels = None, device: o.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: o.Debug = False,
) -> None:  # fmt: skip
    """List the profiles: of all ops and devices, or of what the options leave."""
    from jetfire.core import device as devices
    from jetfire.measure import plan
    from jetfire.tuner import show as profiles

    devices.check_name(device)
    kernels = plan.parse_list(kernel or [])
    request = problems.request(op or ["all"], m, n, k, workload, block, "fwd", set_, kernels)
    where = None if device == "auto" else devices.Device.parse(device)
    profiles.show(plan.parse_list(op or []), where, as_json, profiles.Wanted.of(request, kernels))
