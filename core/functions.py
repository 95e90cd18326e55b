"""The public function that solves an op's problem, and its arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jetfire.core.tensors import Quantized, names_of

if TYPE_CHECKING:
    from jetfire.core.op import Op
    from jetfire.core.tensors import Tensors


def called(op: Op, fields: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the public function that solves problems of these fields; None where there is none."""
    module = sys.modules[type(op).__module__]
    name = op.function(fields, getattr(module, "__all__", ()))
    return None if name is None else getattr(module, name)


def arguments(op: Op, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
    """Return the arguments of that function: those of the op's that it takes.

    A tensor is passed only where it is an input. The problem may have a field of the same name,
    which says whether the tensor is given.
    """
    function = called(op, fields)
    assert function is not None, f"{op.name} has no public function"
    given = op.arguments(fields, inputs)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation == "Quantized":
            found[name] = _quantized(name, inputs, fields["block"])
        elif name in given and (name in inputs or "Tensor" not in str(parameter.annotation)):
            found[name] = given[name]
    return found


def _quantized(name: str, inputs: Tensors, block: int) -> Quantized:
    """Return the matrix whose parts are among an op's inputs, under its own name or as ``q``."""
    own = names_of(name) if name in inputs else names_of()
    q, scale, qt, scale_t = (inputs.get(own[part]) for part in names_of())
    return Quantized(q, scale, qt, scale_t, block)
