"""The problems that a command's options ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jetfire.commands import options as o
from jetfire.core import terminal


def request(
    op: list[str] | None, m: list[str] | None, n: list[str] | None, k: list[str] | None,
    workload: str | None, block: list[str] | None, mode: str, settings: list[str] | None,
    kernels: Sequence[str],
) -> Any:  # fmt: skip
    """The shape options that several commands share, checked; no torch is loaded."""
    from jetfire.bench import command
    from jetfire.measure import plan

    asked = command.BenchOptions(
        ops=op or (), m=o.joined(m), n=o.joined(n), k=o.joined(k), workload=workload,
        block=block or (), mode=(mode,), settings=settings or (),
    )  # fmt: skip
    request = command.request_of(asked)
    plan.check_kernels(request.ops, kernels)
    plan.check(request)
    return request


def cases(request: Any, default_m: int) -> Any:
    """The problems of a request; those of one size where it names none."""
    from jetfire.measure import plan

    if request.workload is None and "m" not in request.sizes:
        request = dataclasses.replace(request, sizes={**request.sizes, "m": [default_m]})
    return plan.cases(request, terminal.note)
