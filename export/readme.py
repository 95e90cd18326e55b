"""The README of an export."""

from __future__ import annotations

from typing import Any

from jetfire.export.c_text import capital, fields
from jetfire.export.library import Library
from jetfire.export.manifest import origin
from jetfire.export.plan import ExportPlan
from jetfire.export.render import render
from jetfire.export.samples import Sample


def readme(form: str, plan: ExportPlan, library: Library, sample: Sample, **more: object) -> bytes:
    """Return the README of a C library (`form` is ``c``), or of an operator for a target."""
    known: dict[str, Any] = {
        "form": form,
        "plan": plan,
        "name": plan.name,
        "library": library,
        "cuda": bool(library.cuda_sources),
        "capability": "{}.{}".format(*plan.capability),
        "summary": capital(plan.op.summary),
        "fixed": fields(plan.fixed),
        "dims": plan.signature.dims,
        "numbers": plan.signature.numbers,
        "returned": [p.name for p in plan.signature.allocated],
        "recorded": "×".join(map(str, plan.sizes(sample.problem).values())),
        "origins": [origin(plan, t) for t in plan.tuned],
        "rate": "rate" if plan.op.flops(plan.problem) else "bandwidth",
        # Of addresses the operator asks more than the C function.
        "contract": library.contract[form != "c" :],
        "others": sorted(set(library.files) - {f"{plan.name}.h"}),
    }
    return render("README.md.j2", **known, **more)
