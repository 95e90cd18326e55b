"""Calls of public functions with empty tensors: no kernel sees them, but shapes must be right."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jetfire import ops
from jetfire.core import registry
from jetfire.core.contract import Op, Tensors
from jetfire.core.device import Device
from jetfire.fuzz.case import Case, Outcome

UNIT = 1024  # every op takes multiples of it


def function(op: Op, mode: str) -> Any:
    """The function that a caller of an op in one mode calls; None where there is none."""
    public = getattr(sys.modules[type(op).__module__], "__all__", ())
    names = [name for name in public if name.endswith("_backward") == (mode == "bwd")]
    return getattr(ops, names[0]) if names else None


def run(case: Case, device: Device) -> Outcome:
    """Call it with the tensors of the case's sizes, and look at what it returns."""
    op, fields = registry.get(case.op), case.problem
    call = function(op, fields.get("mode", "fwd"))
    inputs = _inputs(op, fields, device.torch_device, case)
    given = {**fields, "packed": fields.get("operands") == "packed", **inputs}
    parameters = inspect.signature(call).parameters
    for name, parameter in parameters.items():  # a field says whether there is such a tensor
        if "Tensor" in str(parameter.annotation) and name not in inputs:
            given.pop(name, None)
    bias, c = (inputs[k].clone() if k in inputs else None for k in ("bias", "c"))
    returned = call(**{name: given[name] for name in parameters if name in given})
    found = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    expected = op.returned(_results(op, fields))
    results = [(tuple(tensor.shape), tensor.dtype) for tensor in found]
    if results != list(expected.values()):
        return Outcome("wrong", f"results {results}: expected {expected}")
    for name, tensor in zip(expected, found, strict=True):
        if _is_sum(op, fields, name):
            value = torch.zeros_like(tensor)
            for term in (bias, c) if name == "c" else ():
                value = value if term is None else value + term
            if not torch.equal(tensor, value.to(tensor.dtype)):
                return Outcome("wrong", f"{name}: a sum of nothing is not 0")
    return Outcome()


def _is_sum(op: Op, fields: Mapping[str, Any], name: str) -> bool:
    """Whether an output is a sum over a size of 0; others that are not empty may hold anything."""
    return any(fields[size] == 0 and name in outputs for size, outputs in op.sums.items())


def _sized(op: Op, fields: Mapping[str, Any], size: int) -> Any:
    """The problem with a size in place of 0."""
    return op.Problem.parse({k: size if _is_zero(v) else v for k, v in fields.items()})


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def _at_zero(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """A shape at 0, of those at a size and at twice that size: what grows with it is empty."""
    return tuple(a if a == b else 0 for a, b in zip(first, second, strict=True))


def _both(op: Op, fields: Mapping[str, Any]) -> list[tuple[Any, Tensors]]:
    meta = torch.device("meta")
    problems = [_sized(op, fields, size) for size in (UNIT, 2 * UNIT)]
    return [(problem, op.inputs(problem, meta)) for problem in problems]


def _results(op: Op, fields: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each output."""
    first, second = (op.outputs(problem, inputs) for problem, inputs in _both(op, fields))
    return {
        name: (_at_zero(tensor.shape, second[name].shape), tensor.dtype)
        for name, tensor in first.items()
    }


def _inputs(op: Op, fields: Mapping[str, Any], device: torch.device, case: Case) -> Tensors:
    """Of the smaller problem, cut."""
    (problem, first), (_, second) = _both(op, fields)
    made = op.inputs(problem, device, case.data_seed, case.data)
    cut = {}
    for name, tensor in made.items():
        shape = _at_zero(first[name].shape, second[name].shape)
        cut[name] = tensor[tuple(slice(0, size) for size in shape)].contiguous()
    return cut
