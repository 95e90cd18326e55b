"""`jetfire audit`: registers, spills and matrix instructions of GPU kernels, on any machine.

Run as a module it prints JSON lines: with ``--specs`` for each line of standard input what
`audit_specs` says of it, else the audits, disassembly and all, of ``OP KERNEL ARCH [FIELD=VALUE…]``
(fields of the config as ``config.FIELD=VALUE``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from jetfire.bench.progress import watch
from jetfire.core import broken, registry, terminal
from jetfire.core.device import Device, capability_of, target_device
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.core.kernel import Kernel
from jetfire.core.launch import needs_another_device
from jetfire.core.machine_code import Audit, Cubin, audit, audits
from jetfire.measure.plan import Case
from jetfire.report import output
from jetfire.report.table import Table
from jetfire.report.text import size_text

# Tensor-core instructions by generation: warpgroup (sm_90), warp (sm_80), tcgen05 (sm_100).
MATRIX = ("IGMMA", "IMMA", "QGMMA", "HGMMA", "HMMA", "UTCIMMA", "UTCQMMA", "UTCHMMA")

COLUMNS = ("arch", "kernel", "function", "regs", "spills", "shared", "warps", "instrs", "matrix")
HEAD = (*COLUMNS[:3], "registers", *COLUMNS[4:7], "instructions", "matrix")  # for people
LEFT = (0, 1, 2, len(HEAD) - 1)
SPARE = ("instructions", "warps")  # what goes first where a terminal is narrow
PAUSE_S = 5.0  # between two lines of progress where there is no terminal


def run(
    cases: Sequence[Case],
    kernel_names: Sequence[str],
    devices: Sequence[Device],
    form: str = "table",
) -> None:
    """Give a table per problem: a row for every function that a kernel's default config launches.

    Raises:
        UsageError: no kernel has machine code for any of it.
        NoDeviceError: nor on these architectures, but one has on another.
    """
    work = []
    reasons: dict[str, None] = {}
    elsewhere = False
    for case, device in product(cases, devices):
        for kernel in registry.kernels(case.op.name).values():
            if kernel_names and kernel.name not in kernel_names:
                continue
            config = kernel.default(case.problem, device)
            if reason := kernel.legal(case.problem, config, device):
                reasons[f"{kernel.name}: {reason}"] = None
                elsewhere |= needs_another_device(kernel, case.problem, device)
            else:
                work.append((case, device, kernel))
    compiled: list[tuple[Case, Device, Kernel, Cubin]] = []
    try:
        for case, device, kernel in watch(
            work, lambda item: f"{item[1].name} {item[2].name}: {item[0]}", PAUSE_S
        ):
            cubins = _cubins(case, kernel, device)
            compiled += [(case, device, kernel, one) for one in cubins]
            if not cubins:
                reasons[f"{kernel.name}: has no machine code"] = None
    finally:  # after Ctrl-C too
        found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
        audited = audits([cubin for *_, cubin in compiled])
        for (case, device, kernel, _), one in zip(compiled, audited, strict=True):
            found[case].append(_row(device, kernel, one))
        rows = [
            {"op": case.op.name, "problem": case.problem.as_dict(), **row}
            for case, part in found.items()
            for row in part
        ]
        output.give(
            form, {"audits": rows}, lambda: _print(found), lambda: _tables(found), lambda: rows
        )
    if not rows:
        none = "no kernel with machine code takes these problems on these architectures"
        kind = NoDeviceError if elsewhere else UsageError
        raise kind(": ".join(filter(None, (none, "; ".join(reasons)))))


def _print(found: Mapping[Case, Sequence[Mapping[str, Any]]]) -> None:
    console = terminal.console(width=160)
    for title, table in _tables(found).items():
        console.print(terminal.styled(title, "bold"), soft_wrap=True)
        console.print(table.rich(folded=(2, len(HEAD) - 1), spare=SPARE))


def _tables(found: Mapping[Case, Sequence[Mapping[str, Any]]]) -> dict[str, Table]:
    """Return a table for each problem that some kernel takes."""
    tables = {}
    for case, rows in found.items():
        texts = [{**row, "shared": size_text(row["shared"])}.values() for row in rows]
        if rows:
            tables[str(case)] = Table(HEAD, [list(map(str, row)) for row in texts], LEFT)
    return tables


def _cubins(case: Case, kernel: Kernel, device: Device) -> Sequence[Cubin]:
    """Return the machine code of each function that a kernel's default config launches."""
    assert device.capability is not None
    config = kernel.default(case.problem, device)
    with broken.compiling(case.op.name, kernel.name, device.name):
        return kernel.cubins(case.problem, config, device.capability) or ()


def _row(device: Device, kernel: Kernel, found: Audit) -> dict[str, Any]:
    """Return what `COLUMNS` names of a function."""
    matrix = [f"{name} {n}" for name, n in found.instructions.items() if name in MATRIX]
    values = (
        device.name,
        kernel.name,
        found.name,
        found.registers,
        found.spills,
        found.shared_bytes,
        found.warps,
        sum(found.instructions.values()),
        " ".join(matrix),
    )
    return dict(zip(COLUMNS, values, strict=True))


def audit_specs(specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the audits of kernels' default configs, without their machine code.

    Args:
        specs: ``{"op": …, "kernel": …, "capability": [major, minor], "problem": {field: value}}``.

    Returns:
        Each spec with ``"config"`` and ``"audits"``, or with ``"refused"``, the kernel's reason.
    """
    answers: list[dict[str, Any]] = []
    compiled: list[tuple[list[dict[str, Any]], Cubin]] = []
    for spec in specs:
        capability = (spec["capability"][0], spec["capability"][1])
        problem = registry.get(spec["op"]).Problem.parse(spec["problem"])
        kernel = registry.get_kernel(spec["op"], spec["kernel"])
        device = target_device(capability)
        config = kernel.default(problem, device)
        if (reason := kernel.legal(problem, config, device)) is not None:
            answers.append({**spec, "refused": reason})
            continue
        of_spec: list[dict[str, Any]] = []
        answers.append({**spec, "config": config.as_dict(), "audits": of_spec})
        cubins = kernel.cubins(problem, config, capability) or ()
        compiled += [(of_spec, cubin) for cubin in cubins]
    audited = audits([cubin for _, cubin in compiled])
    for (of_spec, _), found in zip(compiled, audited, strict=True):
        of_spec.append(asdict(found))
        del of_spec[-1]["sass"]
    return answers


def main(arguments: list[str]) -> None:
    if arguments == ["--specs"]:
        for answer in audit_specs([json.loads(line) for line in sys.stdin]):
            print(json.dumps(answer))
        return
    op_name, kernel_name, arch, *fields = arguments
    pairs = dict(field.split("=", 1) for field in fields)
    chosen = {k.removeprefix("config."): pairs.pop(k) for k in list(pairs) if "config." in k}
    capability = capability_of(arch)
    problem = registry.get(op_name).Problem.parse(pairs)
    kernel, device = registry.get_kernel(op_name, kernel_name), target_device(capability)
    config = kernel.Config.parse({**kernel.default(problem, device).as_dict(), **chosen})
    if (reason := kernel.legal(problem, config, device)) is not None:
        raise UsageError(f"{op_name}/{kernel_name}, {problem}: {reason}")
    for cubin in kernel.cubins(problem, config, capability) or ():
        print(json.dumps(asdict(audit(cubin))))


if __name__ == "__main__":
    main(sys.argv[1:])
