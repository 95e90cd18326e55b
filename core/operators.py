"""The ops as torch operators, `torch.ops.jetfire.*`, which torch.compile and profilers see.

An op's file declares its operators by their schemas, whose names are those of the op: a tensor is
an input, anything else a field of the `Problem`. Sizes come from the tensors. Nothing is checked
here beyond what `Problem` checks: the op's public functions check, and are what to call. Autograd
takes every result for a constant, even of inputs that require gradients, unless the operator is
`Differentiable`.

Importing this imports no torch: an operator is defined at once where torch is there, else by its
first call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors, dtype_name

if TYPE_CHECKING:
    import torch

    from jetfire.core.replay import Served

Shape = tuple[int, ...]
# Makes fields of a problem that follow from its operator's arguments, those that its parameters
# name: of a tensor it gets the shape, or None where there is none.
Derive = Callable[..., dict[str, Any]]
_ARGUMENT = re.compile(r"(\w+)(?:\((\w)!\))?(\?)? (\w+)")


def _packed(returns: str) -> Callable[[Tensors], Any]:
    """Return a function from an op's outputs to what a schema returns, such as ``Tensor[]``."""
    if returns == "()":
        return lambda outputs: None
    if returns == "Tensor":
        return lambda outputs: next(iter(outputs.values()))
    kind = list if returns == "Tensor[]" else tuple
    return lambda outputs: kind(outputs.values())


def _size(first: Shape) -> dict[str, Any]:
    m, n = first
    return {"m": m, "n": n}


def of_product(a: Shape, b: Shape, bias: Shape | None) -> dict[str, Any]:
    """Return the fields of a product A·Bᵀ of K-contiguous matrices."""
    return {"m": a[0], "n": b[0], "k": a[1], "bias": bias is not None}


def of_step(
    param: Shape, q: Shape | None, qt: Shape | None, grad_scale: Shape | None
) -> dict[str, Any]:
    """Return the fields of a weight's step: the codes that are given say the layout."""
    m, n = param
    layouts = {(True, True): "none", (False, True): "q", (True, False): "qt"}
    layout = layouts.get((q is None, qt is None), "both")
    return {"m": m, "n": n, "layout": layout, "guarded": grad_scale is not None}


def arguments_of(schema: str) -> list[tuple[str, str, str, str]]:
    """Return each argument's type, alias if it is written, ``?`` if it may be None, and name."""
    return _ARGUMENT.findall(schema.partition("(")[2].rpartition(" -> ")[0])


def define(schema: str, served: Served, fake: Callable[..., Any], constant: bool = True) -> Any:
    """Define an overload of a torch operator, and return it.

    Args:
        fake: the same without memory, for tracing.
        constant: autograd takes its results for constants.

    Raises:
        UsageError: there is one of this name.
    """
    import torch

    from jetfire.core import calls, replay

    name, library = schema.partition("(")[0], calls.LIBRARY
    # Kernels take row-major tensors alone: Inductor must not lay inputs out anew.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    try:
        library.define(schema, tags=tags)
    except RuntimeError as error:
        if "multiple times" not in str(error):
            raise
        raise UsageError(
            f"there is an operator {name!r} already: expected ops of different names"
        ) from None
    library.impl(name, served.run, "CPU")
    library.impl(name, replay.serve(name, served), "CUDA")
    torch.library.register_fake(f"jetfire::{name}", fake, lib=library)
    if constant:
        # By torch's default, float outputs would require gradients, and backward would warn.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.jetfire, packet), variant or "default")


class Operator:
    """A torch operator of an op, called with the arguments of its schema in their order.

    torch drops arguments at the end that equal their schema's defaults: the op's fields then have
    their own defaults.

    It returns the op's outputs in order, as its schema says. Where it writes to its arguments it
    returns nothing.

    Args:
        schema: ``name(Tensor x, Tensor? seed, int block, …) -> Tensor[]``, tensors first.
        op: its op's name; by default the op that the schema names, ``gelu`` of ``gelu_backward…``
            and of ``gelu.…``.
        derive: by default the first tensor is m×n.
        dtype_field: the field that is the first tensor's dtype.
        renamed: inputs that are an argument of another name, which is that input too: ``dy`` of an
            operator that overwrites it.
        joined: return the op's two quantised outputs of one shape as one matrix: codes and scales
            beside each other, those of transposes under each other. Its kernels then write halves
            of longer rows.
        fields: fields with the same values in every call; ``…_backward…`` has the mode bwd besides.
    """

    def __init__(
        self,
        schema: str,
        op: str | None = None,
        derive: Derive | None = None,
        dtype_field: str | None = None,
        renamed: Mapping[str, str] | None = None,
        joined: bool = False,
        **fields: Any,
    ) -> None:
        self.schema, self.joined = schema, joined
        self.name, _, rest = schema.partition("(")
        forward, backward, _ = self.name.partition("_backward")
        self.op = op or forward.partition(".")[0]
        arguments = arguments_of(schema)
        self._tensors = tuple(name for kind, _, _, name in arguments if kind == "Tensor")
        self._scalars = tuple(name for kind, _, _, name in arguments if kind != "Tensor")
        self.written = tuple(name for _, writes, _, name in arguments if writes)
        self._written_places = tuple(map(self._tensors.index, self.written))
        self._returns = rest.rpartition(" -> ")[2]
        self._renamed = tuple((renamed or {}).items())
        self._fields = {"mode": "bwd", **fields} if backward else fields
        self._dtype_field, self._derive = dtype_field, derive or _size
        self._derived_from = tuple(signature(derive).parameters) if derive else self._tensors[:1]
        self._sized = tuple(name for name in self._derived_from if name in self._tensors)
        self._places = tuple(map(self._tensors.index, self._sized))
        if sys.modules.get("torch"):
            self.define()

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def define(self) -> None:
        """Define the operator in torch, if it is not defined yet."""
        _ = self.overload

    @cached_property
    def overload(self) -> Any:
        """The operator in torch, to be called."""
        return self._define(self.schema)

    def inputs(self, args: tuple[Any, ...]) -> Tensors:
        """Return the op's inputs that are given."""
        found = {name: x for name, x in zip(self._tensors, args, strict=False) if x is not None}
        for name, source in self._renamed:
            found[name] = found[source]
        return found

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all that a call's problem depends on: the first dtype, shapes, then the scalars.

        A model has few keys, each many times. A key takes less time to make than the fields.
        """
        shapes = [None if (x := args[i]) is None else x.shape for i in self._places]
        return (args[0].dtype, *shapes, *args[len(self._tensors) :])

    def fields(self, key: tuple[Any, ...]) -> dict[str, Any]:
        """Return the fields of the problem of a call with this key."""
        dtype, *rest = key
        known = dict(zip((*self._sized, *self._scalars), rest, strict=False))
        derived = self._derive(*(known[name] for name in self._derived_from))
        if self._dtype_field:
            derived[self._dtype_field] = dtype_name(dtype)
        given = {name: known[name] for name in self._scalars if name in known}
        return {**derived, **self._fields, **given}

    def _define(self, schema: str, constant: bool = True) -> Any:
        """Define an overload; where `constant`, autograd takes its results for constants."""
        from jetfire.core import calls, replay

        packed, launch, allocate = _packed(self._returns), calls.launch, calls.allocate

        def run(*args: Any) -> Any:
            return packed(launch(self, args))

        def solve(*args: Any) -> list[torch.Tensor]:
            outputs = launch(self, args)
            return [] if self.written else list(outputs.values())

        def fake(*args: Any) -> Any:
            return packed(allocate(self, args))

        return define(schema, replay.Served(run, solve, self._written_places), fake, constant)


class Differentiable(Operator):
    """An operator whose first output has a gradient in its argument number `leaf`.

    It has a second overload `constant` without a gradient, for calls that need none: in torch 2.13
    the first costs 20 µs more per call, as every argument is converted twice more.

    Args:
        backward, setup: as in `torch.library.register_autograd`.
        rest: as in an `Operator`.
    """

    def __init__(
        self,
        schema: str,
        leaf: int,
        backward: Callable[..., Any],
        setup: Callable[..., None],
        **rest: Any,
    ) -> None:
        self._leaf, self._backward, self._setup = leaf, backward, setup
        super().__init__(schema, **rest)

    @cached_property
    def overload(self) -> Any:
        import torch

        from jetfire.core.calls import LIBRARY

        name, _, arguments = self.schema.partition("(")
        differentiable = self._define(self.schema, constant=False)
        torch.library.register_autograd(
            f"jetfire::{name}", self._backward, setup_context=self._setup, lib=LIBRARY
        )
        constant, leaf = self._define(f"{name}.constant({arguments}"), self._leaf

        def call(*args: Any) -> Any:
            x = args[leaf]
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                return differentiable(*args)
            return constant(*args)

        return call
