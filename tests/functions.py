"""The public functions of `jetfire.ops`, each with arguments that it takes: what its op says."""

import inspect
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from jetfire import ops
from jetfire.core import functions, registry
from jetfire.core.errors import UsageError
from jetfire.core.op import Op

M, N = 40, 64  # of every matrix: whole blocks across, a ragged one down
SIZES = {"m": M, "n": N, "k": N}
CPU = torch.device("cpu")


def names() -> list[str]:
    """Every public function, by name."""
    return [name for name in ops.__all__ if not isinstance(getattr(ops, name), type)]


def arguments() -> dict[str, list[dict[str, Any]]]:
    """What to call each function with, by keyword; new tensors each time, always of the same bits.

    Everything that a tensor may be made of is in one of a function's calls: both ways, every
    output, in place. The first is of the usual problem.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for op in map(registry.get, registry.names()):
        for problem in dict.fromkeys(_problems(op)):
            if (function := functions.called(op, problem.as_dict())) is not None:
                found.setdefault(function.__name__, []).extend(_calls(op, problem))
    return found


def call(name: str, **options: Any) -> dict[str, Any]:
    """What to call a function with for a problem of some fields; other options are added."""
    every = map(registry.get, registry.names())
    op = next(op for op in every if name in vars(inspect.getmodule(type(op))))
    known = op.Problem.__dataclass_fields__
    fields = {key: value for key, value in options.items() if key in known}
    added = {key: value for key, value in options.items() if key not in known}
    for mode in op.modes:
        problem = op.problems(mode, {**_sizes(op), **fields})[0]
        if functions.called(op, problem.as_dict()) is getattr(ops, name):
            return {**next(_calls(op, problem)), **added}
    raise LookupError(name)


def _sizes(op: Op) -> dict[str, int]:
    return {name: SIZES[name] for name in op.dims}


def _calls(op: Op, problem: Any) -> Iterator[dict[str, Any]]:
    """A call for a problem, and one that writes over an input where the function may."""
    fields = problem.as_dict()
    yield functions.arguments(op, fields, op.inputs(problem, CPU))
    inputs = op.inputs(problem, CPU)
    takes = inspect.signature(functions.called(op, fields)).parameters
    if "inplace" in takes and op.in_place(problem, inputs):
        yield {**functions.arguments(op, fields, inputs), "inplace": True}


def _problems(op: Op) -> Iterator[Any]:
    """Of each mode the usual ones, these with each field changed, and with all that go together."""
    for mode in op.modes:
        for usual in op.problems(mode, _sizes(op)):
            yield usual
            together = usual
            for change in _changes(usual):
                yield from _changed(op, usual, change)
                together = next(_changed(op, together, change), together)
            yield together
            if "out" in vars(usual):
                yield from _changed(op, usual, {"out": "int8", "rounding": "stochastic"})
            if "out_block" in vars(usual):
                yield from _changed(op, together, {"block": 64, "out_block": 32})


def _changed(op: Op, problem: Any, change: dict[str, Any]) -> Iterator[Any]:
    """A problem with another field; none where the op takes no such one."""
    try:
        yield op.Problem.parse(op.fitted({**problem.as_dict(), **change}))
    except UsageError:
        return


def _changes(problem: Any) -> Iterator[dict[str, Any]]:
    """Another value of each field that has few, or that may be missing.

    Each other one of a field that says which tensors are given.
    """
    for name, hint in get_type_hints(type(problem)).items():
        value = getattr(problem, name)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if hint is bool:
            yield {name: not value}
        elif isinstance(hint, UnionType) and value is None:
            yield {name: M}
        elif name != "mode" and (others := [choice for choice in choices if choice != value]):
            every = name in ("product", "given")
            yield from ({name: other} for other in (others if every else others[-1:]))
