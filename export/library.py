"""The C function of an export: its header, and the sources that every target builds.

A CUDA kernel becomes readable CUDA C++ (`cuda`), any kernel compiled code in a C file
(`embedded`); both have one header, so that what is built on them need not know which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jetfire.core.machine_code import Cubin
from jetfire.export.c_text import capital, comment, fields, hang
from jetfire.export.plan import ExportPlan
from jetfire.export.render import render, static


@dataclass(frozen=True)
class Library:
    """An implementation of a plan's function.

    Attributes:
        files: name → content; all in one folder. `with_header` adds `<name>.h`.
        cuda_sources: those that nvcc compiles, for `architecture`.
        c_sources: those that a C compiler does; they need CUDA's headers, and link nothing of it:
            the driver is opened when the function is first called.
        architecture: as nvcc names it: ``90a``.
        workspace: the function takes a workspace.
        zeros: the workspace must be zeros before its first use; else it may hold anything.
        any_size: it takes any sizes that keep to the contract, not only those of the plan.
        contract: what callers must keep to, beyond shapes and dtypes: a sentence each, that on
            addresses first.
    """

    files: dict[str, bytes]
    cuda_sources: tuple[str, ...]
    c_sources: tuple[str, ...]
    architecture: str
    workspace: bool
    any_size: bool
    contract: tuple[str, ...]
    zeros: bool = True

    @property
    def sources(self) -> tuple[str, ...]:
        return *self.cuda_sources, *self.c_sources


@dataclass(frozen=True)
class Compiled:
    """One kernel function's machine code.

    Attributes:
        name: in the C files: lower case, an identifier, the file's own.
        about: what it is, in a line of a comment.
    """

    name: str
    cubin: Cubin
    about: str


def code_files(plan: ExportPlan, kernels: Sequence[Compiled]) -> dict[str, bytes]:
    """Return ``<name>_code.c`` and ``<name>_code.h``, and what loads and launches the code."""
    found = {
        f"{plan.name}_code.{ending}": render(f"c/code.{ending}.j2", plan=plan, kernels=kernels)
        for ending in ("c", "h")
    }
    return {**found, "driver.h": static("c/driver.h")}


def parameters(plan: ExportPlan, *, workspace: bool) -> list[str]:
    """Return the function's parameters, with their types."""
    return [
        *(f"{p.pointer} {p.name}" for p in plan.signature.parameters),
        *(f"int {dim}" for dim in plan.signature.dims),
        *(["void* workspace"] if workspace else []),
        "struct CUstream_st* stream",
    ]


def dims(plan: ExportPlan) -> str:
    """The sizes as parameters."""
    return ", ".join(f"int {dim}" for dim in plan.signature.dims)


def prototype(plan: ExportPlan, symbol: str, workspace: bool, end: str, before: str = "") -> str:
    """Return the exported function's prototype, under any name."""
    given = parameters(plan, workspace=workspace)
    return hang(f"{before}int {symbol}(", given, f"){end}")


def with_header(plan: ExportPlan, library: Library) -> Library:
    """Return a library with `<name>.h` too: contract, function, its error codes and their texts."""
    done = "tuned" if library.any_size else "compiled"
    about = (
        f"{capital(plan.op.summary)}: kernel `{plan.kernel.name}` of Jetfire, {done} for "
        "sm_{}{}.".format(*plan.capability)
    )
    header = render(
        "library.h.j2",
        plan=plan,
        workspace=library.workspace,
        zeros=library.zeros,
        any_size=library.any_size,
        runtime=bool(library.cuda_sources),  # launches it, and not the driver
        about=comment(about),
        fixed=comment(f"Fixed: {fields(plan.fixed)}.") if plan.fixed else "",
        contract=map(comment, library.contract),
        dims=dims(plan),
        prototype=prototype(plan, plan.name, library.workspace, ";"),
    )
    return replace(library, files={f"{plan.name}.h": header, **library.files})
