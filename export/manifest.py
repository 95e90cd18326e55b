"""What self-tests, benchmarks, bindings and build files read of an export.

These are files that are copied as they stand. What they must know of a function is data: tables in
a header for C and C++, assignments for make and CMake, JSON for Python.
"""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import jetfire
from jetfire.export.c_text import capital, fields, hang
from jetfire.export.foreign import Foreign
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan, TunedProblem
from jetfire.export.render import render
from jetfire.export.samples import Sample

_ROLES = {"input": "READ", "output": "WRITTEN", "updated": "READ | WRITTEN"}


def tables(plan: ExportPlan, sample: Sample) -> list[dict[str, Any]]:
    """The function's tensors in its order, as programs have them.

    Of each `shape` has a dim's number, factor and divisor of every side, `written` the shape of the
    part, from the tensor's beginning, that a call must write, and `tolerance` what
    ‖written - expected‖/‖expected‖ may be; 0 where bits must be equal.
    """
    numbers = {dim: i for i, dim in enumerate(plan.signature.dims)}
    outputs = {p.key: sample.expected[p.name] for p in plan.signature.outputs}
    parts = plan.op.written(sample.problem, sample.inputs, outputs)
    found = []
    for p in plan.signature.parameters:
        tensor = sample.inputs[p.name] if p.role == "input" else sample.expected[p.name]
        part = tensor if p.role == "input" else parts[p.key]
        assert part.storage_offset() == tensor.storage_offset()
        shape = tuple((numbers.get(e.dim or "", -1), e.factor, e.divisor) for e in p.shape)
        found.append(
            {
                "name": p.name,
                "dtype": str(p.dtype).removeprefix("torch."),
                "role": p.role,
                "shape": shape,
                "written": tuple(part.shape),
                "tolerance": sample.tolerance.get(p.name, 0.0),
                "shown": p.shown,
            }
        )
    return found


def _in_c(table: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor's table with what C has in its place."""
    sides = table["shape"] or ((-1, 1, 1),)
    return {
        **table,
        "role": _ROLES[table["role"]],
        "extents": [f"{{{', '.join(map(str, side))}}}" for side in sides],
        "rows": math.prod(table["written"][:-1]),
        "columns": math.prod(table["written"][-1:]),
    }


@dataclass(frozen=True)
class Origin:
    """What a README says of a problem: its time and rate when tuned are None where another config
    is used, of another problem or of one launch in place of two."""

    sizes: tuple[int, ...]
    config: str
    microseconds: float | None
    rate: str | None
    where: Foreign


def origin(plan: ExportPlan, tuned: TunedProblem) -> Origin:
    """Say where a problem's config comes from, in words."""
    entry, problem = tuned.entry, tuned.problem
    exact = tuned.own and entry.problem == problem.as_dict()
    nearest = "×".join(map(str, plan.sizes_tuned(tuned).values()))
    one = "" if tuned.own else "one launch in place of two; "
    return Origin(
        tuple(plan.sizes(problem).values()),
        ", ".join(f"{name}={value}" for name, value in tuned.config.as_dict().items()),
        round(1e3 * entry.ms, 2) if exact else None,
        _rate(plan, tuned) if exact else None,
        tuned.where if exact else Foreign(f"{one}for {nearest}, {tuned.where.text}"),
    )


def _rate(plan: ExportPlan, tuned: TunedProblem) -> str:
    """Return multiply-add operations per second, or bytes for an op that has none."""
    ms, flops = tuned.entry.ms, plan.op.flops(tuned.problem)
    if flops:
        return f"{flops / ms / 1e9:.0f} TFLOP/s"
    return f"{plan.op.bytes(tuned.problem) / ms / 1e6:.0f} GB/s"


def _flops(plan: ExportPlan) -> float:
    """Return the operations for each product of the sizes; 0 where they are not so many for all."""
    other = plan.with_sizes(**dict(zip(plan.op.dims, (3072, 6144, 9216), strict=False)))
    problems = [*(t.problem for t in plan.tuned), other]
    found = {plan.op.flops(p) / math.prod(plan.sizes(p).values()) for p in problems}
    return found.pop() if len(found) == 1 else 0.0


def _c_string(text: str) -> str:
    """C of a string, in continued lines."""
    return " \\\n  ".join(
        json.dumps(line) for line in textwrap.wrap(text, 90, drop_whitespace=False)
    )


def header(plan: ExportPlan, library: Library, sample: Sample) -> bytes:
    """Return `manifest.h`."""
    signature = plan.signature
    names = [p.name for p in signature.parameters]
    found = [signature.dim_from(dim) for dim in signature.dims]
    passed = [f"({p.pointer})tensor[{i}]" for i, p in enumerate(signature.parameters)]
    sizes = [f"size[{i}]" for i in range(len(signature.dims))]
    extra = ["workspace"] if library.workspace else []
    return render(
        "manifest.h.j2",
        plan=plan,
        library=library,
        schema=_c_string(signature.schema),
        flops=f"{_flops(plan):.1f}",
        dims=signature.dims,
        inputs=len(signature.inputs),
        numbers=len(signature.numbers),
        tensors=list(map(_in_c, tables(plan, sample))),
        origins=[(names.index(o[0].name), o[1]) if o else (-1, 0) for o in found],
        recorded_sizes=plan.sizes(sample.problem).values(),
        tuned=[origin(plan, t) for t in plan.tuned],
        size_arguments=sizes,
        call=hang(f"  return {plan.name}(", [*passed, *sizes, *extra, "stream"], ");"),
    )


def assignments(plan: ExportPlan, library: Library) -> bytes:
    """Return `manifest.mk`, which make includes and CMake reads."""
    lines = [f"NAME := {plan.name}", f"SOURCES := {' '.join(library.sources)}"]
    lines += [f"ARCHITECTURE := {library.architecture}"] if library.cuda_sources else []
    return "".join(f"{line}\n" for line in lines).encode()


def version(library: Library) -> str:
    """Return a version that is another for each other code, as PEP 440 has it."""
    digest = hashlib.sha256()
    for name, content in sorted(library.files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{jetfire.__version__}+{digest.hexdigest()[:12]}"


def python(plan: ExportPlan, library: Library, sample: Sample, **more: object) -> bytes:
    """Return `manifest.json`."""
    found = {
        "name": plan.name,
        "summary": capital(plan.op.summary),
        "kernel": plan.kernel.name,
        "capability": "{}.{}".format(*plan.capability),
        "fixed": fields(plan.fixed),
        # Of addresses the operator asks more than the C function.
        "contract": library.contract[1:],
        "sources": [f"csrc/{source}" for source in library.sources],
        "architecture": library.architecture if library.cuda_sources else None,
        "workspace": library.workspace,
        "zeros": library.zeros,
        "sizes": plan.signature.dims,
        "numbers": plan.signature.numbers,
        "recorded": list(plan.sizes(sample.problem).values()),
        "tensors": tables(plan, sample),
        **more,
    }
    return (json.dumps(found, indent=1) + "\n").encode()
