"""`jetfire export`: one kernel of one problem to a folder."""

from __future__ import annotations

from pathlib import Path

from jetfire import ops
from jetfire.bench.plan import Case
from jetfire.export import export
from jetfire.ops import profiles
from jetfire.ops.device import target_device
from jetfire.ops.errors import UsageError
from jetfire.ops.run import report


def run(cases: list[Case], kernel_name: str, capability: tuple[int, int], folder: Path) -> None:
    """Export with the profile's config for the architecture, else the default; print the files.

    Raises:
        UsageError: there is not just one problem, or it was not tuned, and profiles are strict.
    """
    if len(cases) != 1:
        shown = "; ".join(str(case) for case in cases[:3])
        raise UsageError(f"export takes one problem, given {len(cases)}: {shown}")
    case = cases[0]
    kernel = ops.get_kernel(case.op.name, kernel_name)
    device = target_device(capability)
    found = profiles.find(kernel, case.problem, device)
    report(case.op, kernel, case.problem, device, found)
    for file in export(case.op, kernel, case.problem, found.config, capability, folder):
        print(file)
