"""`jetfire audit`: registers, spills and matrix instructions of Triton kernels, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jetfire import ops
from jetfire.bench.plan import Case
from jetfire.ops.device import Device, target_device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Kernel

# Tensor-core instructions by generation: warpgroup (sm_90), warp (sm_80), tcgen05 (sm_100).
MATRIX = ("IGMMA", "IMMA", "QGMMA", "HGMMA", "HMMA", "UTCIMMA", "UTCQMMA", "UTCHMMA")


def capability_of(text: str) -> tuple[int, int]:
    """``90``, ``9.0`` or ``sm_90`` as (9, 0).

    Raises:
        UsageError: it is none of these.
    """
    digits = text.removeprefix("sm_").replace(".", "")
    if not digits.isdigit() or len(digits) < 2:
        raise UsageError(f"--arch {text}: expected an architecture such as 90 or sm_90")
    return int(digits[:-1]), int(digits[-1])


def run(cases: Sequence[Case], kernel_names: Sequence[str], architectures: Sequence[str]) -> None:
    """A table a problem: one row for every function that a kernel's default config launches."""
    devices = [target_device(capability_of(text)) for text in architectures]
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = False
    for case in cases:
        table = Table(title=str(case), title_justify="left")
        for column in ("arch", "kernel", "function", "regs", "spills", "shared", "warps",
                       "instrs", "matrix"):  # fmt: skip
            table.add_column(column, no_wrap=True)
        for device in devices:
            for kernel in ops.kernels(case.op.name).values():
                if not kernel_names or kernel.name in kernel_names:
                    _add_rows(table, case, kernel, device)
        if table.row_count:
            console.print(table)
            found = True
    if not found:
        raise UsageError("no Triton kernel takes these problems on these architectures")


def _add_rows(table: Table, case: Case, kernel: Kernel, device: Device) -> None:
    from jetfire.kernels_triton.crosscompile import audit, compile_launches

    config = kernel.default(case.problem, device)
    if device.capability is None or kernel.legal(case.problem, config, device) is not None:
        return
    launched = compile_launches(case.op.name, kernel.name, case.problem, config, device.capability)
    for found in map(audit, launched):
        matrix = [f"{name} {n}" for name, n in found.instructions.items() if name in MATRIX]
        table.add_row(
            device.name, kernel.name, found.name, str(found.registers), str(found.spills),
            str(found.shared_bytes), str(found.warps), str(sum(found.instructions.values())),
            " ".join(matrix),
        )  # fmt: skip
