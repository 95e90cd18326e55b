"""Parameters of an exported function: an op's tensors, their shapes expressions of its sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from jetfire.core.errors import UsageError
from jetfire.core.op import Op
from jetfire.core.tensors import Tensors, ceil_div

Role = Literal["input", "updated", "output"]
# Sizes at which an extent is read off: of no two the quotients, or their ceilings, are alike.
_PROBES = (1, 2, 3, 5, 8, 13)
_UNIT = 3072  # a multiple of every block, and of whatever a `Problem` may ask sizes to be one of
DIVISORS = (2, 8, 16, 32, 64, 128, 256, 512, 1024)
C_TYPES = {
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
}


@dataclass(frozen=True)
class Extent:
    """``⌈factor·dim / divisor⌉`` elements, or `factor` of them where there is no dim."""

    dim: str | None
    factor: int = 1
    divisor: int = 1

    def of(self, sizes: dict[str, int]) -> int:
        """Return the number of elements at some sizes."""
        if self.dim is None:
            return self.factor
        return ceil_div(self.factor * sizes[self.dim], self.divisor)

    def __str__(self) -> str:
        if self.dim is None:
            return str(self.factor)
        product = self.dim if self.factor == 1 else f"{self.factor}{self.dim}"
        return product if self.divisor == 1 else f"⌈{product}/{self.divisor}⌉"


@dataclass(frozen=True)
class Parameter:
    """One tensor of the function: contiguous, on the device.

    Attributes:
        role: ``updated`` is read and written.
        shape: of as many extents as it has dimensions.
        key: its name among the op's inputs or outputs; `name` is another where an input and an
            output have the same and are two tensors.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Extent, ...]
    role: Role
    key: str

    @property
    def pointer(self) -> str:
        """The type of a C parameter; bf16 and fp16 are passed as their bits."""
        return f"{'const ' if self.role == 'input' else ''}{C_TYPES[self.dtype]}*"

    @property
    def shown(self) -> str:
        """Shape and dtype as documentation has it: ``m×k int8``."""
        size = "×".join(map(str, self.shape)) or "1"
        return f"{size} {str(self.dtype).removeprefix('torch.')}"

    def sizes(self, dims: dict[str, int]) -> tuple[int, ...]:
        return tuple(extent.of(dims) for extent in self.shape)


@dataclass(frozen=True)
class Signature:
    """The tensors in the op's order, inputs first, and then its sizes.

    Attributes:
        dims: the sizes: integers that every function takes.
    """

    parameters: tuple[Parameter, ...]
    dims: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Parameter, ...]:
        """Parameters that are read, updated tensors included."""
        return tuple(p for p in self.parameters if p.role != "output")

    @property
    def outputs(self) -> tuple[Parameter, ...]:
        """Parameters that are written, updated tensors included."""
        return tuple(p for p in self.parameters if p.role != "input")

    @property
    def allocated(self) -> tuple[Parameter, ...]:
        """What an operator returns: written, and not given."""
        return tuple(p for p in self.parameters if p.role == "output")

    @property
    def numbers(self) -> list[str]:
        """The sizes that are an operator's arguments, as no input's shape shows them."""
        return [dim for dim in self.dims if self.dim_from(dim) is None]

    @property
    def schema(self) -> str:
        """An operator's type as `torch.library` writes it, without its name."""
        aliases = iter("abcdefghijklmnopqrstuvwxyz")
        taken = [
            f"Tensor({next(aliases)}!) {p.name}" if p.role == "updated" else f"Tensor {p.name}"
            for p in self.inputs
        ]
        taken += [f"SymInt {dim}" for dim in self.numbers]
        given = ["Tensor"] * len(self.allocated)
        returned = given[0] if len(given) == 1 else f"({', '.join(given)})"
        return f"({', '.join(taken)}) -> {returned}"

    def tensors(self, inputs: Tensors, outputs: Tensors) -> Tensors:
        """Return what to pass of an op's inputs and outputs, by the parameters' names."""
        return {p.name: (inputs if p.role == "input" else outputs)[p.key] for p in self.parameters}

    def dim_from(self, dim: str) -> tuple[Parameter, int] | None:
        """An input of which one side is just that size, and which side; None where none is."""
        for parameter in self.inputs:
            for side, extent in enumerate(parameter.shape):
                if extent == Extent(dim):
                    return parameter, side
        return None


def name_of_output(op: Op, problem: Any, inputs: Tensors, name: str) -> str:
    """Return its parameter's name: where it is no input's update, another than the input's."""
    return f"{name}_out" if name in inputs and name not in op.updated(problem) else name


def _extent(name: str, found: Sequence[tuple[dict[str, int], int]]) -> Extent:
    """Return the one expression that has these values at these sizes.

    Raises:
        UsageError: none of those that are tried has.
    """
    dims = found[0][0]
    tried: Iterable[Extent] = (
        Extent(None, found[0][1]),
        *(Extent(dim, factor) for dim in dims for factor in (1, 2, 3, 4)),
        *(Extent(dim, 1, divisor) for dim in dims for divisor in DIVISORS),
        *(Extent(dim, 3, divisor) for dim in dims for divisor in DIVISORS),  # of Q, K and V
    )
    for extent in tried:
        if all(extent.of(sizes) == value for sizes, value in found):
            return extent
    raise UsageError(f"{name}: its size is no simple function of {', '.join(dims)}: cannot export")


def signature_of(op: Op, problem: Any) -> Signature:
    """Read the signature off the op's own inputs and outputs, at several sizes.

    Raises:
        UsageError: a tensor's shape is no simple function of the sizes, or its dtype has no C type.
    """
    probes: list[tuple[Any, Tensors, Tensors]] = []
    for i in range(len(_PROBES)):
        sizes = {d: _UNIT * _PROBES[(i + j) % len(_PROBES)] for j, d in enumerate(op.dims)}
        probes.append((sizes, *op.on_meta(dataclasses.replace(problem, **sizes))))
    _, inputs, outputs = probes[0]
    updated = op.updated(problem)

    def parameter(key: str, name: str, which: int, role: Role) -> Parameter:
        tensor = probes[0][which][key]
        if tensor.dtype not in C_TYPES:
            raise UsageError(f"{op.name}: {key} is {tensor.dtype}: cannot export")
        shapes = [(probe[0], probe[which][key].shape) for probe in probes]
        shape = tuple(
            _extent(f"{op.name}: {key}", [(sizes, s[side]) for sizes, s in shapes])
            for side in range(tensor.dim())
        )
        return Parameter(name, tensor.dtype, shape, role, key)

    parameters = [
        parameter(key, key, 1, "updated" if key in updated else "input") for key in inputs
    ]
    for key in outputs:
        name = name_of_output(op, problem, inputs, key)
        if name not in updated:
            parameters.append(parameter(key, name, 2, "output"))
    return Signature(tuple(parameters), op.dims)
