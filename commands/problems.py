"""The problems that a command's options ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jetfire.commands import options as o
from jetfire.core import terminal

if TYPE_CHECKING:
    from jetfire.measure.plan import Case, Request


def request(given: Mapping[str, Any], **more: Any) -> Request:
    """Return what OP, ``--m``, ``--block``, ``--set`` and so on ask for, checked without torch.

    Args:
        given: a command's arguments, called as the fields of `BenchOptions`.
        more: those that are taken otherwise than given.
    """
    from jetfire.bench import command
    from jetfire.measure import plan

    asked = o.collect(command.BenchOptions, given, **more)
    found = command.request_of(asked)
    plan.check_kernels(found.ops, asked.kernels)
    plan.check(found)
    return found


def cases(request: Request, default_m: int) -> Sequence[Case]:
    """Return the problems of a request; those of one size where it names none."""
    from jetfire.measure import plan

    if request.workload is None and "m" not in request.sizes:
        request = replace(request, sizes={**request.sizes, "m": [default_m]})
    return plan.cases(request, terminal.note)
