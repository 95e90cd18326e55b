"""`jetfire audit`: registers, spills and matrix instructions of Triton kernels, on any machine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jetfire import ops
from jetfire.bench.plan import Case
from jetfire.ops.device import target_device
from jetfire.ops.errors import UsageError

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
    """One row for every function that a kernel's default config launches, on stdout."""
    from jetfire.kernels_triton.crosscompile import audit, compile_launches

    capabilities = [capability_of(text) for text in architectures]
    table = Table(title="default configs, cross-compiled")
    for column in ("arch", "problem", "kernel", "function", "regs", "spills", "shared", "warps",
                   "instructions", "matrix"):  # fmt: skip
        table.add_column(column, overflow="fold")
    for capability in capabilities:
        device = target_device(capability)
        for case in cases:
            for kernel in ops.kernels(case.op.name).values():
                if kernel_names and kernel.name not in kernel_names:
                    continue
                config = kernel.default(case.problem, device)
                if kernel.legal(case.problem, config, device) is not None:
                    continue
                launched = compile_launches(
                    case.op.name, kernel.name, case.problem, config, capability
                )
                for found in map(audit, launched):
                    matrix = {k: v for k, v in found.instructions.items() if k in MATRIX}
                    table.add_row(
                        device.name, str(case), kernel.name, found.name, str(found.registers),
                        str(found.spills), str(found.shared_bytes), str(found.warps),
                        str(sum(found.instructions.values())),
                        " ".join(f"{k} {v}" for k, v in matrix.items()),
                    )  # fmt: skip
    Console().print(table)
