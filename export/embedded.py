"""A Triton kernel as compiled code: C files with the cubins and tables of what a call launches.

It is compiled for each problem of a plan, and for the sample's. What its own `launch`
would launch (`recording`) is written as tables, which `files/c/launcher.h` reads.
"""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jetfire.core.errors import UsageError
from jetfire.core.machine_code import Cubin
from jetfire.export import samples
from jetfire.export.c_text import WIDTH, capital, comment, hang
from jetfire.export.library import Compiled, Library, code_files, dims, prototype, with_header
from jetfire.export.plan import ExportPlan
from jetfire.export.recording import (
    Address,
    Argument,
    LaunchRecording,
    Scratch,
    TensorMap,
    record,
)
from jetfire.export.render import render, static

_ALIGNMENT = 256  # of a piece of the workspace, in bytes
_MAP_TYPES = {"int8": "UINT8", "bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT32"}
_FORMATS = {"i32": "<i", "i64": "<q", "fp32": "<f"}


def library(plan: ExportPlan) -> Library:
    """Compile every launch of every problem, and describe it in C.

    Raises:
        UsageError: the kernel does more than launch kernels.
    """
    cases = {t.problem: t.config for t in plan.tuned}
    cases.setdefault(samples.small_problem(plan), plan.configs[0])
    names = plan.op.name, plan.kernel.name, plan.capability
    recordings = record([(*names, problem, config) for problem, config in cases.items()])
    sizes = [plan.sizes(problem) for problem in cases]
    kernels = _compiled(sizes, recordings)
    problems = _problems(plan, sizes, list(cases.values()), recordings, kernels)
    workspace = any(recording.scratch for recording in recordings)
    zeros = any(scratch.zeroed for recording in recordings for scratch in recording.scratch)
    files = {
        f"{plan.name}.c": _launcher(plan, problems, list(kernels.values()), workspace),
        "launcher.h": static("c/launcher.h"),
        **code_files(plan, list(kernels.values())),
    }
    found = Library(
        files=files,
        cuda_sources=(),
        c_sources=(f"{plan.name}.c", f"{plan.name}_code.c"),
        architecture="{}{}".format(*plan.capability),
        workspace=workspace,
        any_size=False,
        contract=(
            "All addresses are multiples of 16.",
            f"The sizes are among those that {plan.name}.c was compiled for, which it lists.",
            "The driver is CUDA 12.0's or newer; the first call opens it.",
        ),
        zeros=zeros,
    )
    return with_header(plan, found)


def _compiled(
    every: Sequence[Mapping[str, int]], recordings: Sequence[LaunchRecording]
) -> dict[Cubin, Compiled]:
    """Return each different code once, with the sizes that it is of."""
    users: dict[Cubin, dict[str, None]] = {}
    for sizes, recording in zip(every, recordings, strict=True):
        shown = "×".join(map(str, sizes.values()))
        for call in recording.calls:
            users.setdefault(call.cubin, {})[shown] = None
    found: dict[Cubin, Compiled] = {}
    for cubin, used in users.items():
        before = sum(other.name == cubin.name for other in found)
        name = f"{cubin.name}_{before + 1}" if before else cubin.name
        about = textwrap.shorten(f"Of {', '.join(used)}.", WIDTH - 3, placeholder=" …")
        found[cubin] = Compiled(name, cubin, about)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _places(scratch: Sequence[Scratch], zeroed: int) -> tuple[list[int], int]:
    """Return where a launch's scratch memory lies in the workspace, and how much there is.

    What must be zero comes first, as much for all sizes (`zeroed`), so that nothing that a call
    leaves there is another size's counter.
    """
    ends = {True: 0, False: zeroed}
    found = []
    for piece in scratch:
        found.append(ends[piece.zeroed])
        ends[piece.zeroed] += _aligned(piece.nbytes)
    return found, ends[False]


def _problems(
    plan: ExportPlan,
    every: Sequence[Mapping[str, int]],
    configs: Sequence[Any],
    recordings: Sequence[LaunchRecording],
    kernels: Mapping[Cubin, Compiled],
) -> list[dict[str, Any]]:
    """Return what `<name>.c` has in its tables of each problem."""
    zeroed = max(sum(_aligned(s.nbytes) for s in r.scratch if s.zeroed) for r in recordings)
    tensors = [p.name for p in plan.signature.parameters]
    problems, tables = [], 0
    for sizes, config, recording in zip(every, configs, recordings, strict=True):
        places, size = _places(recording.scratch, zeroed)
        launches, matrices = [], []
        for call in recording.calls:
            tables += 1
            maps = [a.value for a in call.arguments if isinstance(a.value, TensorMap)]
            names = iter(f"{tables}_{i}" for i in range(len(maps)))
            matrices += [_matrix(m, f"{tables}_{i}") for i, m in enumerate(maps)]
            launches.append(
                {
                    "number": tables,
                    "kernel": kernels[call.cubin].name.upper(),
                    "grid": call.grid,
                    "maps": len(maps),
                    "arguments": [
                        {"name": a.name, "fields": _fields(a, tensors, places, names)}
                        for a in call.arguments
                    ],
                }
            )
        problems.append(
            {
                "about": _about(sizes, config),
                "sizes": sizes.values(),
                "workspace": size,
                "matrices": matrices,
                "launches": launches,
            }
        )
    return problems


def _launcher(
    plan: ExportPlan,
    problems: Sequence[Mapping[str, Any]],
    kernels: Sequence[Compiled],
    workspace: bool,
) -> bytes:
    """Return the text of `<name>.c`."""
    about = (
        f"{capital(plan.op.summary)}: kernel `{plan.kernel.name}`, compiled for "
        "sm_{}{}, for the sizes in PROBLEMS.".format(*plan.capability)
    )
    launches = [launch for problem in problems for launch in problem["launches"]]
    tensors = [p.name for p in plan.signature.parameters]
    return render(
        "c/launcher.c.j2",
        plan=plan,
        codes=plan.name.upper(),
        language="c",
        about=comment(about),
        kernels=kernels,
        problems=problems,
        most_arguments=max(len(launch["arguments"]) for launch in launches) + 1,
        most_matrices=max(1, *(launch["maps"] for launch in launches)),
        tensors=hang("  const void* const tensors[] = {", tensors, "};"),
        dims=dims(plan),
        prototype=prototype(plan, plan.name, workspace, " {"),
        workspace=workspace,
    )


def _matrix(found: TensorMap, number: str) -> dict[str, Any]:
    if len(found.sizes) != 2 or found.address.offset:
        raise UsageError("a parameter is a map of no whole matrix: cannot export")
    return {"number": number, "type": _MAP_TYPES[found.dtype], "map": found}


def _fields(
    argument: Argument, tensors: Sequence[str], places: Sequence[int], matrices: Iterator[str]
) -> str:
    """Write an argument as C initialises one."""
    value = argument.value
    if isinstance(value, TensorMap):
        of = tensors.index(str(value.address.of))
        return f".kind = TENSOR, .tensor = {of}, .matrix = &MATRIX_{next(matrices)}"
    if isinstance(value, Address) and isinstance(value.of, int):
        return f".kind = WORKSPACE, .value = {places[value.of] + value.offset}"
    if isinstance(value, Address):
        return f".kind = TENSOR, .tensor = {tensors.index(value.of)}, .value = {value.offset}"
    content = struct.pack(_FORMATS[argument.type], value)
    return f".kind = NUMBER, .value = {int.from_bytes(content, 'little', signed=True)}"


def _about(sizes: Mapping[str, int], config: Any) -> str:
    """A problem and its config in lines of a comment."""
    at = " ".join(f"{dim}={size}" for dim, size in sizes.items())
    tuned = " ".join(f"{name}={value}" for name, value in config.as_dict().items())
    return comment(f"{at}: {tuned}")
