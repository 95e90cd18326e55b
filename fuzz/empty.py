"""Calls of public functions with empty tensors: no kernel sees them, but shapes must be right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_origin

import torch
from torch.utils._pytree import tree_leaves

from jetfire.core import calls, functions, registry
from jetfire.core.device import Device
from jetfire.core.op import Op
from jetfire.core.problem import hints_of
from jetfire.core.tensors import Specs, Tensors, dtype_of
from jetfire.fuzz.example import Example, Outcome

UNIT = 1024  # every op takes multiples of it


def run(case: Example, device: Device) -> Outcome:
    """Call the case's function with tensors of its sizes, and look at what it returns."""
    op, fields = registry.get(case.op), case.problem
    call = functions.called(op, fields)
    assert call is not None
    inputs = _inputs(op, fields, device.torch_device, case)
    problem, _ = calls.problem_of(op, fields)
    sums = _sums(op, problem, inputs)
    arguments = functions.arguments(op, fields, inputs)
    updated = [inputs[name] for name in op.updated(problem)]
    found = _results(call(**arguments), arguments, updated)
    expected = op.returned(_at_zero(op, op.writes, fields))
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in found]
    if kinds != [(spec.shape, dtype_of(spec.dtype)) for spec in expected.values()]:
        return Outcome("wrong", f"results {kinds}: expected {expected}")
    written = op.written(problem, inputs, dict(zip(expected, found, strict=True)))
    for name, value in sums.items():
        if not torch.equal(written[name], value.float().to(written[name].dtype)):
            return Outcome("wrong", f"{name}: not what a sum of nothing leaves")
    return Outcome()


def _results(
    returned: Any, arguments: Mapping[str, Any], updated: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors that a function returns, but for those that it hands on: a scale, statistics."""

    def among(x: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
        return any(x is other for other in others)

    leaves = [x for x in tree_leaves(returned) if isinstance(x, torch.Tensor)]
    given = tree_leaves(arguments)
    return [x for x in leaves if among(x, updated) or not among(x, given)]


def _sums(op: Op, problem: Any, inputs: Tensors) -> Tensors:
    """Return what the reference has of outputs that are sums over a size of 0.

    Others that are not empty may hold anything. Before the call, which may add to an input.
    """
    sizes = [size for size in op.sums if getattr(problem, size) == 0]
    names = {name for size in sizes for name in op.sums[size]} & op.writes(problem).keys()
    expected = op.reference(problem, inputs) if names else {}
    return {name: expected[name] for name in names}


def _sized(op: Op, fields: Mapping[str, Any], size: int) -> Any:
    """The problem with a size in place of 0; a field with choices is none."""
    hints = hints_of(op.Problem)
    zeros = [
        name
        for name, value in fields.items()
        if type(value) is int and value == 0 and get_origin(hints[name]) is not Literal
    ]
    return op.Problem.parse({**fields, **dict.fromkeys(zeros, size)})


def _at_zero(op: Op, specs: Callable[[Any], Specs], fields: Mapping[str, Any]) -> Specs:
    """Return the specs at sizes of 0: a side that grows from a size to twice that size is empty."""
    first, second = (specs(_sized(op, fields, size)) for size in (UNIT, 2 * UNIT))
    found = {}
    for name, spec in first.items():
        sides = zip(spec.shape, second[name].shape, strict=True)
        found[name] = spec._replace(shape=tuple(a if a == b else 0 for a, b in sides))
    return found


def _inputs(op: Op, fields: Mapping[str, Any], device: torch.device, case: Example) -> Tensors:
    """Cut the inputs of the smaller problem."""
    made = op.inputs(_sized(op, fields, UNIT), device, case.data_seed, case.data)
    return {
        name: made[name][tuple(slice(0, size) for size in spec.shape)].contiguous()
        for name, spec in _at_zero(op, op.reads, fields).items()
    }
