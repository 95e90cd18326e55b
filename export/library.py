"""The C function of an export: its header, and the sources that every target builds.

A CUDA kernel becomes readable CUDA C++ (`cuda`), any kernel compiled code in a C file
(`embedded`); both have one header, so that what is built on them need not know which it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetfire.export.c_text import capital, comment, fields, hang
from jetfire.export.plan import ExportPlan


@dataclass(frozen=True)
class Library:
    """An implementation of a plan's function.

    Attributes:
        files: name → content, the header `<name>.h` included; all in one folder.
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


def parameters(plan: ExportPlan, *, workspace: bool) -> list[str]:
    """Return the function's parameters, with their types."""
    return [
        *(f"{p.pointer} {p.name}" for p in plan.signature.parameters),
        *(f"int {dim}" for dim in plan.signature.dims),
        *(["void* workspace"] if workspace else []),
        "struct CUstream_st* stream",
    ]


def header(
    plan: ExportPlan,
    *,
    workspace: bool,
    any_size: bool,
    contract: tuple[str, ...],
    zeros: bool = True,
    runtime: bool = False,
) -> bytes:
    """Return `<name>.h`: the contract, the function, its error codes and their texts.

    Args:
        runtime: CUDA's runtime launches it, and not the driver.
    """
    from jetfire.export.render import render

    fixed = fields(plan.fixed)
    return render(
        "library.h.j2",
        plan=plan,
        workspace=workspace,
        zeros=zeros,
        any_size=any_size,
        runtime=runtime,
        about=comment(
            f"{capital(plan.op.summary)}: kernel `{plan.kernel.name}` of Jetfire, "
            f"{'tuned' if any_size else 'compiled'} for sm_{''.join(map(str, plan.capability))}."
        ),
        fixed=comment(f"Fixed: {fixed}.") if fixed else [],
        contract=[line for sentence in contract for line in comment(sentence)],
        prototype=hang(f"int {plan.name}(", parameters(plan, workspace=workspace), ");"),
    )
