"""Fused: a layer's forward and its backward, each one operator made of other operators' calls.

On a GPU both are replayed (`core.replay`) and autograd's node is C++: a call takes one entry into
the dispatcher instead of one for each launch. Elsewhere, and while torch.compile traces, the same
two bodies run in Python and show the operators that they call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from jetfire.core import replay
from jetfire.core.once import once_differentiable
from jetfire.core.operators import arguments_of, define

Maybe = torch.Tensor | None
# Solves one half, of all arguments of its schema.
Body = Callable[..., list[torch.Tensor]]
Constants = tuple[bool | int | float | str, ...]


class Fused:
    """A function of tensors whose gradient is an operator, too.

    Forward returns its result and then what backward needs of what it made. Backward takes the
    result's gradient, contiguous; the tensors that were kept, and those that forward made (None
    where it made none); forward's constants; and for each leaf whether its gradient is wanted. It
    returns those that are, in order. Both run without autograd.

    Args:
        forward, backward: schemas, ``name(Tensor x, …, int block, …) -> Tensor[]``, tensors first.
        forward_body, backward_body: what they do.
    """

    def __init__(
        self, forward: str, forward_body: Body, backward: str, backward_body: Body
    ) -> None:
        self._forward, self._backward = forward_body, backward_body
        self._names = tuple(schema.partition("(")[0] for schema in (forward, backward))
        kinds = [kind for kind, *_ in arguments_of(backward)]
        self._saved = kinds.count("Tensor") - 1  # less the result's gradient
        for schema, body in ((forward, forward_body), (backward, backward_body)):
            composed(schema, body)
        self._function = _function(self)
        self._in_graph = torch.compiler.allow_in_graph(self._in_python)

    def __call__(
        self,
        leaves: Sequence[Maybe],
        tensors: Sequence[Maybe],
        kept: Sequence[Maybe],
        constants: Constants,
    ) -> torch.Tensor:
        """Return forward's result.

        Args:
            leaves: what has a gradient, in the order of backward's results.
            tensors, constants: forward's arguments.
            kept: tensors that are there already and that backward reads, beside forward's results.
        """
        if torch.compiler.is_compiling():
            return self._in_graph(leaves, tensors, kept, constants)
        if _in_cpp(leaves):
            result: torch.Tensor = self._pair(leaves, tensors, kept, constants)
            return result
        return self._in_python(leaves, tensors, kept, constants)

    def _in_python(
        self,
        leaves: Sequence[Maybe],
        tensors: Sequence[Maybe],
        kept: Sequence[Maybe],
        constants: Constants,
    ) -> torch.Tensor:
        """Return the same by a node of autograd in Python.

        torch.compile traces the operators that it calls, and not its Python: a tenth of a second
        for each layer.
        """
        counts = len(leaves), len(tensors)
        made: torch.Tensor = self._function.apply(constants, counts, *leaves, *tensors, *kept)
        return made

    @cached_property
    def _pair(self) -> Any:
        return replay.extension().Pair(*self._names, self._saved)


def composed(schema: str, body: Body) -> Any:
    """Define and return an operator whose body calls others: on a GPU they are replayed as one."""

    def run(*args: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return body(*args)

    return define(schema, replay.Served(run, run, ()), body)


_in_sight = 0


@contextmanager
def bodies_in_python() -> Iterator[None]:
    """Have every call run its bodies in Python, where they can be watched."""
    global _in_sight
    _in_sight += 1
    try:
        yield
    finally:
        _in_sight -= 1


def _in_cpp(leaves: Sequence[Maybe]) -> bool:
    """Return whether C++ takes a call of these leaves: the first is a plain tensor on a GPU.

    The others may be of any kind, as they are only told their gradients.
    """
    x = leaves[0]
    if _in_sight or x is None or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return x.is_cuda and replay.extension() is not None


def _function(fused: Fused) -> type[torch.autograd.Function]:
    """Return the same node of autograd in Python."""
    forward_body, backward_body, saved = fused._forward, fused._backward, fused._saved

    class FusedFunction(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, constants: Constants, counts: tuple[int, int], *given: Maybe
        ) -> torch.Tensor:
            leaves, end = counts[0], sum(counts)
            result, *made = forward_body(*given[leaves:end], *constants)
            none = [None] * (saved - len(given[end:]) - len(made))
            ctx.save_for_backward(*given[end:], *made, *none)
            ctx.constants, ctx.leaves, ctx.given = constants, leaves, len(given)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Maybe, ...]:
            needs = ctx.needs_input_grad[2 : 2 + ctx.leaves]
            arguments = grads[0].contiguous(), *ctx.saved_tensors, *ctx.constants, *needs
            found = iter(backward_body(*arguments))
            wanted = [next(found) if need else None for need in needs]
            return None, None, *wanted, *[None] * (ctx.given - ctx.leaves)

    return FusedFunction
