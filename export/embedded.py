"""Any kernel as compiled code: a C file with the cubins and a launcher of the driver API.

A Triton kernel is compiled for each problem of a plan, and for the sample's: what its own `launch`
would launch (`recording`) becomes C, as far as it is the same for all, and else a table by sizes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from jetfire.export import compiled, cuda, samples
from jetfire.export.c_text import WIDTH, capital, comment, hang, unless
from jetfire.export.compiled import Compiled
from jetfire.export.launches import ProblemGroup, Writer, structure
from jetfire.export.library import Library, header, parameters
from jetfire.export.plan import ExportPlan
from jetfire.export.recording import Call, LaunchRecording, TensorMap, record
from jetfire.export.render import render
from jetfire.export.table import ProblemTable
from jetfire.kernels_triton.kernel import TritonKernel

_ALIGNMENT = 256  # of a piece of the workspace, in bytes


def library(plan: ExportPlan) -> Library:
    """Compile every launch of every problem, and describe it in C.

    Raises:
        UsageError: the kernel does more than launch kernels, or is a CUDA kernel without host code.
    """
    if not isinstance(plan.kernel, TritonKernel):
        return cuda.compiled_library(plan)
    cases = {t.problem: t.config for t in plan.tuned}
    cases.setdefault(samples.small_problem(plan), plan.configs[0])
    names = plan.op.name, plan.kernel.name, plan.capability
    recordings = record([(*names, problem, config) for problem, config in cases.items()])
    kernels, kernel_of = _compiled(plan, list(cases), recordings)
    places, sizes = _workspace(recordings)
    contract = (
        "All addresses are multiples of 16.",
        f"The sizes are among those that {plan.name}.c was compiled for, which it lists.",
        "The driver is CUDA 12.0's or newer; the first call opens it.",
    )
    workspace = any(sizes)
    zeros = any(scratch.zeroed for recording in recordings for scratch in recording.scratch)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, recording in enumerate(recordings):
        groups.setdefault(structure(recording), []).append(i)
    grouped = [
        ProblemGroup(rows, [recordings[i] for i in rows], [places[i] for i in rows])
        for rows in groups.values()
    ]
    launcher = _launcher(plan, cases, grouped, kernels, kernel_of, sizes)
    return Library(
        files={
            f"{plan.name}.h": header(
                plan, workspace=workspace, any_size=False, contract=contract, zeros=zeros
            ),
            f"{plan.name}.c": launcher,
            **compiled.files(plan.name, plan.capability, kernels),
        },
        cuda_sources=(),
        c_sources=(f"{plan.name}.c", f"{plan.name}_code.c"),
        architecture=f"{plan.capability[0]}{plan.capability[1]}",
        workspace=workspace,
        any_size=False,
        contract=contract,
        zeros=zeros,
    )


def _compiled(
    plan: ExportPlan, problems: Sequence[Any], recordings: Sequence[LaunchRecording]
) -> tuple[list[Compiled], dict[Call, str]]:
    """Return each different code once, and each call's by its name in the launcher."""
    users: dict[tuple[str, bytes, int, int], list[str]] = {}
    for problem, recording in zip(problems, recordings, strict=True):
        shown = "×".join(map(str, plan.sizes(problem).values()))
        for call in recording.calls:
            sizes = users.setdefault(_identity(call), [])
            if shown not in sizes:
                sizes.append(shown)
    found: dict[tuple[str, bytes, int, int], Compiled] = {}
    for (function, code, threads, shared), sizes in users.items():
        before = sum(kernel.function == function for kernel in found.values())
        found[function, code, threads, shared] = Compiled(
            name=f"{function}_{before + 1}" if before else function,
            function=function,
            code=code,
            threads=threads,
            shared_bytes=shared,
            about=textwrap.shorten(f"Of {', '.join(sizes)}.", WIDTH - 3, placeholder=" …"),
        )
    names = {
        call: found[_identity(call)].name.upper() for each in recordings for call in each.calls
    }
    return list(found.values()), names


def _identity(call: Call) -> tuple[str, bytes, int, int]:
    return call.function, call.code, call.threads, call.shared_bytes


def _workspace(recordings: Sequence[LaunchRecording]) -> tuple[list[list[int]], list[int]]:
    """Return where each recording's scratch memory lies, and how much there is, in bytes.

    What must be zero comes first, as much for all sizes, so that nothing that a call leaves there
    is another size's counter.
    """

    def aligned(size: int) -> int:
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    zeroed = max(sum(aligned(s.nbytes) for s in r.scratch if s.zeroed) for r in recordings)
    places, sizes = [], []
    for recording in recordings:
        ends = {True: 0, False: zeroed}
        found = []
        for scratch in recording.scratch:
            found.append(ends[scratch.zeroed])
            ends[scratch.zeroed] += aligned(scratch.nbytes)
        places.append(found)
        sizes.append(ends[False])
    return places, sizes


def _launcher(
    plan: ExportPlan,
    cases: dict[Any, Any],
    groups: Sequence[ProblemGroup],
    kernels: Sequence[Compiled],
    kernel_of: dict[Call, str],
    workspace: Sequence[int],
) -> bytes:
    """Return the text of `<name>.c`."""
    codes = plan.name.upper()
    everywhere = range(len(cases))
    table = ProblemTable([plan.sizes(problem) for problem in cases])
    pointers = [p.name for p in plan.signature.parameters]
    if any(workspace):
        pointers.append("workspace")
    several = len(groups) > 1
    which = {row: str(n) for n, group in enumerate(groups) for row in group.rows}
    table.choice(
        "launches", "int", everywhere, [which[i] for i in everywhere], "which of those below"
    )
    writers = [
        Writer(
            table,
            group,
            kernel_of,
            (*pointers, *plan.signature.dims),
            f"{codes}_CUDA_ERROR",
            4 if several else 2,
        )
        for group in groups
    ]
    launches = [writer.launches() for writer in writers]
    workspace_bytes = table.number("workspace_bytes", "size_t", everywhere, workspace)
    return render(
        "embedded/launcher.c.j2",
        plan=plan,
        codes=codes,
        about=comment(
            f"{capital(plan.op.summary)}: kernel `{plan.kernel.name}`, compiled for "
            "sm_{}{}, for these sizes with these configs:".format(*plan.capability)
        ),
        kernels=kernels,
        tensor_maps=any(
            isinstance(argument.value, TensorMap)
            for call in kernel_of
            for argument in call.arguments
        ),
        cases=[_shown(table.sizes[i], config) for i, config in enumerate(cases.values())],
        fields=list(table.fields),
        rows=[table.row(i) for i in everywhere],
        groups=launches,
        dims=", ".join(f"int {dim}" for dim in plan.signature.dims),
        prototype=hang(f"int {plan.name}(", parameters(plan, workspace=any(workspace)), ") {"),
        alignment=unless(
            "(",
            [f"(uintptr_t){pointer}" for pointer in pointers],
            ") % 16 != 0",
            f"{codes}_BAD_ALIGNMENT",
            2,
            joint=" | ",
        ),
        workspace_bytes=workspace_bytes if any(workspace) else None,
    )


def _shown(sizes: dict[str, int], config: Any) -> list[str]:
    """A problem and its config in lines of a comment."""
    at = " ".join(f"{dim}={size}" for dim, size in sizes.items())
    tuned = " ".join(f"{name}={value}" for name, value in config.as_dict().items())
    return comment(f"  {at}: {tuned}", "    ")
