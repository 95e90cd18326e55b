"""Takes from a failing case what it does not need, one thing after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jetfire import ops
from jetfire.fuzz.case import Case
from jetfire.fuzz.draw import other_of, problem_of, sizes_of
from jetfire.ops.device import Device

Fails = Callable[[Case], bool]


def simplify(case: Case, device: Device, fails: Fails) -> Case:
    """A case that fails alike, with defaults where they do, in the smallest sizes.

    Hypothesis leaves a size of one kind where one of another kind would be smaller.
    """
    if case.empty:
        return case
    plain: dict[str, Any] = {
        "other": None, "layout": {}, "offset": 0, "data": "normal", "data_seed": 0
    }  # fmt: skip
    for name, value in plain.items():
        case = _first(fails, case, [replace(case, **{name: value})])
    for name in list(case.layout):
        rest = {k: v for k, v in case.layout.items() if k != name}
        case = _first(fails, case, [replace(case, layout=rest)])
    case = _first(fails, case, _with_problem(case, case.problem, device, default=True))
    for name, value in _defaults(case).items():
        case = _first(fails, case, _with_problem(case, {**case.problem, name: value}, device))
    for name in sizes_of(ops.get(case.op)):
        case = _smallest(case, name, device, fails)
    return case


def _first(fails: Fails, case: Case, simpler: list[Case]) -> Case:
    """The first of the simpler ones that fails, or else the case itself."""
    return next((other for other in simpler if other != case and fails(other)), case)


def _defaults(case: Case) -> dict[str, Any]:
    """Fields of the problem that have a default, and it."""
    fields = dataclasses.fields(ops.get(case.op).Problem)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _with_problem(case: Case, fields: Any, device: Device, default: bool = False) -> list[Case]:
    """The case with another problem, and the same config or the default; none where illegal.

    So for what it is compared with, whose config may be the default's too.
    """
    op, kernel = ops.get(case.op), ops.get_kernel(case.op, case.kernel)
    problem = problem_of(op, fields, {})
    if problem is None:
        return []
    config = kernel.default(problem, device) if default else kernel.Config.parse(case.config)
    if kernel.legal(problem, config, device) is not None:
        return []
    other = other_of(case.other, op, kernel, problem, config, device)
    if other is None and case.other is not None:
        return []
    return [replace(case, problem=problem.as_dict(), config=config.as_dict(), other=other)]


def _smallest(case: Case, name: str, device: Device, fails: Fails) -> Case:
    """With the smallest value of a size that fails, if all above it do."""
    low, high = 0, case.problem[name]
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        smaller = _first(fails, case, _with_problem(case, {**case.problem, name: middle}, device))
        if smaller is not case and smaller.problem[name] < high:
            case, high = smaller, smaller.problem[name]
        else:
            low = middle
    return case
