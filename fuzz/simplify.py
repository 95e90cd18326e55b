"""Takes from a failing case what it does not need, one thing after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.fuzz.draw import other_of, problem_of, sizes_of
from jetfire.fuzz.example import Example

Fails = Callable[[Example], bool]
PASSES = 3  # over the sizes: once one is smaller others may be
# Where most faults begin to show: tried first, as what fails may be right again in between.
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129)


def simplify(case: Example, device: Device, fails: Fails) -> Example:
    """Return a case that fails alike, with defaults where they do, in the smallest sizes.

    Each of `fails` is a run: some dozens of them.
    """
    if case.empty:
        return case
    plain: dict[str, Any] = {
        "other": None,
        "layout": {},
        "offset": 0,
        "edges": False,
        "data": "normal",
        "data_seed": 0,
    }
    for name, value in plain.items():
        case = _first(fails, case, [replace(case, **{name: value})])
    for name in list(case.layout):
        rest = {k: v for k, v in case.layout.items() if k != name}
        case = _first(fails, case, [replace(case, layout=rest)])
    case = _first(fails, case, _with_problem(case, case.problem, device, default=True))
    fields = dataclasses.fields(registry.get(case.op).Problem)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    for name, value in defaults.items():
        case = _first(fails, case, _with_problem(case, {**case.problem, name: value}, device))
    # The default of another problem: that of smaller blocks has smaller tiles.
    case = _first(fails, case, _with_problem(case, case.problem, device, default=True))
    for _ in range(PASSES):
        before = case
        for name in sizes_of(registry.get(case.op)):
            case = _smallest(case, name, device, fails)
        if case == before:
            break
    return case


def _first(fails: Fails, case: Example, simpler: list[Example]) -> Example:
    """Return the first of the simpler cases that fails, or else the case itself."""
    return next((other for other in simpler if other != case and fails(other)), case)


def _with_problem(
    case: Example, fields: Any, device: Device, default: bool = False
) -> list[Example]:
    """The case with another problem, and the same config or the default; none where illegal.

    So for what it is compared with, whose config may be the default's too.
    """
    op, kernel = registry.get(case.op), registry.get_kernel(case.op, case.kernel)
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


def _smallest(case: Example, name: str, device: Device, fails: Fails) -> Example:
    """Return the case with the first of `SIZES` that fails, or a smaller one between two of them.

    Of two neighbours either is tried: a problem may take even sizes alone.
    """
    low = 0
    for size in (size for size in SIZES if size < (case.problem[name] or 0)):
        smaller = _of_size(case, name, [size], device, fails)
        if smaller is not case:
            case = smaller
            break
        low = size
    while (case.problem[name] or 0) - low > 1:
        middle = (low + case.problem[name]) // 2
        smaller = _of_size(case, name, [middle, middle + 1], device, fails)
        low = middle if smaller is case else low
        case = smaller
    return case


def _of_size(case: Example, name: str, sizes: list[int], device: Device, fails: Fails) -> Example:
    """The case with the first of some sizes that is smaller and fails, or else itself."""
    problems = ({**case.problem, name: size} for size in sizes)
    found = [other for fields in problems for other in _with_problem(case, fields, device)]
    return _first(fails, case, [c for c in found if c.problem[name] < case.problem[name]])
