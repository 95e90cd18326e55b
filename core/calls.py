"""The body of every operator: find the kernel of the call's problem, and launch it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.launch import choose
from jetfire.core.op import Op
from jetfire.core.tensors import Specs, Tensors, dtype_of, empty

if TYPE_CHECKING:
    from jetfire.core.operators import Operator

# Operators live as long as this object does.
LIBRARY = torch.library.Library("jetfire", "DEF")
# Stands for a size that is symbolic or 0: a multiple of every number that a `Problem` may ask for.
_ANY_SIZE = 3 * 1024
_SIZES = ("m", "n", "k", "rows")


@dataclass(frozen=True)
class Planned:
    """A problem that was asked for, and the kernel and config that solve it on a device."""

    op: Op
    problem: Any
    kernel: Kernel
    config: Any
    device: Device


@profiles.remembered
def _planned() -> dict[tuple[str, Any], Planned]:
    """Return what each problem was planned as, by op and problem, as a dict that `_plan` fills."""
    return {}


def planned() -> list[Planned]:
    """Return every different call since `profiles.forget`."""
    return list(_planned().values())


def problem_of(op: Op, fields: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return a problem, whose sizes may be symbolic or 0, and whether one of them is 0."""
    symbolic = {key: size for key, size in fields.items() if isinstance(size, torch.SymInt)}
    none = {key: 0 for key in _SIZES if type(size := fields.get(key)) is int and size == 0}
    problem = op.Problem.parse({**fields, **dict.fromkeys(symbolic | none, _ANY_SIZE)})
    for key, size in (symbolic | none).items():
        object.__setattr__(problem, key, size)
    return problem, bool(none)


@dataclass(frozen=True, slots=True)  # read twice as fast as a NamedTuple: 48 and 100 ns per call
class _Plan:
    """The problem of a call, and the kernel and config that solve it.

    Attributes:
        kernel: None where a size is 0: `Op.nothing` writes the outputs.
        new: name, shape and dtype of each output. None where one begins as an input
            (`Op.updated`): `Op.outputs` makes them.
    """

    op: Op
    problem: Any
    kernel: Kernel | None
    config: Any
    new: list[tuple[str, tuple[int, ...], torch.dtype]] | None


@profiles.remembered
def _plan(operator: Operator, device: torch.device, key: tuple[Any, ...]) -> _Plan:
    """Return the plan of every call with this key."""
    op = registry.get(operator.op)
    problem, is_empty = problem_of(op, operator.fields(key))
    new = None
    if not op.updated(problem):
        specs = _returned(operator, op.writes(problem)).items()
        new = [(name, spec.shape, dtype_of(spec.dtype)) for name, spec in specs]
    if is_empty:
        return _Plan(op, problem, None, None, new)
    where = Device.of(torch.empty(0, dtype=torch.int8, device=device))
    kernel, config = choose(op, problem, where)
    _planned()[operator.op, problem] = Planned(op, problem, kernel, config, where)
    return _Plan(op, problem, kernel, config, new)


def _returned(operator: Operator, specs: Specs) -> Specs:
    """Return the specs of what an operator returns, of those of its op's outputs."""
    if not operator.joined:
        return specs
    whole: Specs = {}
    for name, spec in list(specs.items())[: len(specs) // 2]:
        m, n = spec.shape
        whole[name] = spec._replace(shape=(2 * m, n) if _axis(name) == 0 else (m, 2 * n))
    return whole


def _halves(whole: Tensors, names: Iterable[str]) -> Tensors:
    """Return the op's outputs of these names, which are halves of what an operator returns."""
    first, second = zip(*(x.chunk(2, _axis(name)) for name, x in whole.items()), strict=True)
    return dict(zip(names, (*first, *second), strict=True))


def _axis(name: str) -> int:
    """Return along which axis halves are joined: transposes lie under one another."""
    return 0 if name.endswith("_t") else 1


def _launch_context(device: torch.device) -> AbstractContextManager[Any] | None:
    """Return the context that a launch on a device needs, or None.

    Triton launches on the current device. CPU kernels are torch operations, which autograd sees.
    """
    if device.type == "cpu":
        return torch.no_grad()
    if device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return None


def launch(operator: Operator, args: tuple[Any, ...]) -> Tensors:
    """Launch into the written inputs, or else into new outputs, and return these in order."""
    inputs, device, written = operator.inputs(args), args[0].device, operator.written
    plan = _plan(operator, device, operator.key(args))
    outputs = {key: inputs[key] for key in written if key in inputs} if written else None
    if not outputs and plan.new is not None:  # to ask the op takes 1 to 2 µs more
        outputs = {name: args[0].new_empty(shape, dtype=dtype) for name, shape, dtype in plan.new}
    returned = outputs = outputs or plan.op.outputs(plan.problem, inputs)
    if operator.joined:
        outputs = _halves(returned, plan.op.writes(plan.problem))
    context = _launch_context(device)
    if plan.kernel is None:
        with torch.no_grad():
            plan.op.nothing(plan.problem, inputs, outputs)
    elif context is None:
        plan.kernel.launch(plan.problem, plan.config, inputs, outputs)
    else:
        with context:
            plan.kernel.launch(plan.problem, plan.config, inputs, outputs)
    if written:  # autograd does not see a launch's writes
        for tensor in outputs.values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
    return returned


def allocate(operator: Operator, args: tuple[Any, ...]) -> Tensors:
    """Return outputs without a launch, for tracing: symbolic sizes stay symbolic."""
    op = registry.get(operator.op)
    problem, _ = problem_of(op, operator.fields(operator.key(args)))
    if operator.joined:
        return empty(_returned(operator, op.writes(problem)), args[0].device)
    return op.outputs(problem, operator.inputs(args))
