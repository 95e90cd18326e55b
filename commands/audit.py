"""`jetfire audit`."""

from __future__ import annotations

from typing import Annotated

from jetfire.commands import options as o
from jetfire.core import terminal

EPILOG = "Example: jetfire audit gemm --arch 90"


def run(
    ops: o.Ops = None,
    m: o.M = None,
    n: o.N = None,
    k: o.K = None,
    block: o.Blocks = None,
    mode: o.Mode = "fwd",
    settings: o.Setting = None,
    kernels: o.Kernels = None,
    arch: Annotated[
        o.Texts, o.listed("--arch", "SM,...", "Architectures (80,89,90,100).", o.ARCHITECTURES)
    ] = None,
    format: o.Format = None,
    load: o.Load = None,
    debug: o.Debug = False,
) -> None:
    """Compile GPU kernels for any architecture; show registers, spills, instructions."""
    from jetfire.core.device import capability_of, target_device
    from jetfire.measure import plan

    targets = [target_device(capability_of(text)) for text in arch or ("80", "89", "90", "100")]
    request = o.request(locals(), ops=ops or ["all"], mode=[mode])
    cases = plan.cases(request.sized(4096), terminal.note)
    from jetfire.bench import audit

    audit.run(cases, kernels or (), targets, format or "table")
