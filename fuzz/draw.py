"""What is drawn: variants of a kernel that a batch shares, and the cases of each.

To compile costs a second and more, to run some milliseconds. So a batch of examples has a few
variants, each of flags, a config and a layout, all of which a kernel may be compiled for; sizes,
values and seeds are drawn for every example.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import assume
from hypothesis import strategies as st

from jetfire.fuzz.case import Case, Other
from jetfire.ops.data import DISTRIBUTIONS
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Kernel, Op
from jetfire.ops.workloads import RAGGED

VARIANTS = 4  # of a batch
TRIES = 60  # at flags that the op and the kernel take together, at a legal config
FRACTIONS = (1e-5, 0.1, 0.5, 0.9)
PADDINGS = (0, 1, 3, 8, 16, 40)
OFFSETS = (0, 1, 2, 4, 8, 16)
MULTIPLES = (16, 32, 64, 128, 256)
SKINNY = 8  # times the largest size, where the others are below `THIN`
THIN = 17
_FULL = {"cross_entropy": ("n",)}  # a row of no logits has no loss
_NO_FUNCTION = ("hadamard_gemm",)
SHAPES = (*["any"] * 6, *["whole"] * 3, "skinny")
UNCOUNTED = 2**31  # elements of a matrix, beyond which 32 bits do not count them
WIDTHS = (33, 128, 1000, 4097, 50257, 2**17 + 1, 2**20)  # of huge matrices, or their heights


@dataclass(frozen=True)
class Variant:
    """What a kernel may be compiled for, but for sizes.

    Attributes:
        flags: fields of the Problem that are no sizes; None in place of a size that is optional.
        config: fields that differ from the default's.
        layout, offset, other: a Case's; of `other`, too, the fields that differ.
    """

    flags: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    offset: int = 0
    other: Other | None = None


@cache
def _fields(op: Op) -> dict[str, Any]:
    return get_type_hints(op.Problem)


def _is_size(annotation: Any) -> bool:
    return annotation is int or isinstance(annotation, UnionType)


def _flag(annotation: Any, rng: random.Random) -> Any:
    if isinstance(annotation, UnionType):  # `int | None`: whether there is one
        return rng.choice((None, 1))
    if get_origin(annotation) is Literal:
        return rng.choice(get_args(annotation))
    if annotation is bool:
        return rng.random() < 0.5
    return rng.choice(FRACTIONS)


def _flags(op: Op, rng: random.Random) -> dict[str, Any]:
    drawn = {k: _flag(hint, rng) for k, hint in _fields(op).items() if hint is not int}
    return {k: v for k, v in drawn.items() if not (_is_size(_fields(op)[k]) and v is not None)}


def problem_of(op: Op, flags: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """A problem of flags and of the sizes that they leave open; None where there is none."""
    open_sizes = {k: v for k, v in sizes.items() if k not in flags}
    try:
        return op.Problem.parse(op.fitted({**open_sizes, **flags}))
    except UsageError:
        return None


def sizes_of(op: Op) -> list[str]:
    return [name for name, hint in _fields(op).items() if _is_size(hint)]


def variants(
    op: Op, kernel: Kernel, device: Device, rng: random.Random, against: Kernel | None = None
) -> list[Variant]:
    """A batch's: defaults in a plain layout first, then configs and layouts of two sets of flags.

    Empty where the kernel takes none of what was tried: it is for another device.
    """
    found: list[Variant] = []
    for _ in range(TRIES):
        flags = _flags(op, rng)
        problem = _typical(op, kernel, flags, device)
        if problem is None:
            continue
        first = Variant(flags, other=_other(kernel, problem, device, rng, against))
        found += [first] + [
            _variant(op, kernel, problem, flags, device, rng, against)
            for _ in range(VARIANTS // 2 - 1)
        ]
        if len(found) >= VARIANTS:
            break
    return found


def _typical(op: Op, kernel: Kernel, flags: Mapping[str, Any], device: Device) -> Any:
    """A problem of some flags that the kernel takes, of a size that any should; None if none."""
    for size in (128, 256, 1024):
        problem = problem_of(op, flags, dict.fromkeys(sizes_of(op), size))
        if problem is not None and _legal(kernel, problem, {}, device) is not None:
            return problem
    return None


def _legal(kernel: Kernel, problem: Any, fields: Mapping[str, Any], device: Device) -> Any:
    """The config of some fields, the others as by default; None where it is illegal."""
    config = dataclasses.replace(kernel.default(problem, device), **fields)
    return config if kernel.legal(problem, config, device) is None else None


def _config(kernel: Kernel, problem: Any, device: Device, rng: random.Random) -> dict[str, Any]:
    """Fields of a legal config from the space; none, after some tries."""
    space = kernel.space(problem, device)
    for _ in range(TRIES if space else 0):
        fields = {name: rng.choice(list(values)) for name, values in space.items()}
        if _legal(kernel, problem, fields, device) is not None:
            return fields
    return {}


def _variant(
    op: Op, kernel: Kernel, problem: Any, flags: Mapping[str, Any], device: Device,
    rng: random.Random, against: Kernel | None,
) -> Variant:  # fmt: skip
    return Variant(
        flags,
        _config(kernel, problem, device, rng),
        _layout(op, problem, rng),
        rng.choice(OFFSETS),
        _other(kernel, problem, device, rng, against),
    )


def _layout(op: Op, problem: Any, rng: random.Random) -> dict[str, tuple[int, int]]:
    """How far apart the rows of each input are, and how far it is moved, where a caller may."""
    import torch

    found = {}
    for name, tensor in op.inputs(problem, torch.device("meta")).items():
        strided = tensor.dim() == 2 and name not in op.contiguous
        padding = rng.choice(PADDINGS) if strided else 0
        found[name] = (padding, rng.choice(OFFSETS))
    return {
        name: (padding, offset) for name, (padding, offset) in found.items() if padding or offset
    }


def _other(
    kernel: Kernel, problem: Any, device: Device, rng: random.Random, against: Kernel | None
) -> Other | None:
    """What to compare with: the kernel that is asked for, else half the time another config."""
    if against is not None:
        return Other(against.name, _config(against, problem, device, rng))
    if rng.random() < 0.5:
        return None
    fields = _config(kernel, problem, device, rng)
    return Other(kernel.name, fields) if fields else None


def _primes(largest: int) -> list[int]:
    return [n for n in range(2, largest + 1) if all(n % i for i in range(2, int(n**0.5) + 1))]


@cache
def _size(largest: int) -> st.SearchStrategy[int]:
    """Sizes around multiples of tiles, small ones, primes, 1, and any."""
    near = [
        size
        for unit in MULTIPLES
        for count in range(1, max(1, largest // unit) + 1)
        for size in (unit * count, unit * count - 1, unit * count + 1)
        if size <= largest
    ]
    parts = [
        st.integers(1, min(largest, THIN)),
        st.sampled_from(sorted(set(near)) or [1]),
        st.sampled_from(_primes(largest) or [1]),
        st.sampled_from([size for size in RAGGED if size <= largest]),
        st.integers(1, largest),
    ]
    return st.one_of(parts)


@cache
def _whole(largest: int) -> st.SearchStrategy[int]:
    """Multiples of 16 and of tiles: what kernels have faster ways for."""
    units = [unit for unit in MULTIPLES if unit <= largest] or [1]
    return st.sampled_from(units).flatmap(
        lambda unit: st.integers(1, largest // unit).map(lambda count: unit * count)
    )


def _sizes(data: st.DataObject, op: Op, largest: int) -> dict[str, int]:
    """Of every dimension: any; or all whole; or skinny, one large and the others small."""
    names = sizes_of(op)
    shape = data.draw(st.sampled_from(SHAPES), label="shape")
    if shape == "skinny":
        long = data.draw(st.sampled_from(names), label="long")
        limits = {name: SKINNY * largest if name == long else THIN for name in names}
        return {name: data.draw(_size(limits[name]), label=name) for name in names}
    strategy = _whole(largest) if shape == "whole" else _size(largest)
    return {name: data.draw(strategy, label=name) for name in names}


def _rounded(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes, then up to what a kernel may want of one, then of all."""
    yield dict(sizes)
    for name, size in sizes.items():
        yield {**sizes, name: -(-size // 16) * 16}
    for unit in (16, 128):
        yield {name: -(-size // unit) * unit for name, size in sizes.items()}


def _taken(
    op: Op, kernel: Kernel, device: Device, flags: Mapping[str, Any], sizes: Mapping[str, int]
) -> Any:
    """The first problem of those sizes, or of them rounded up, that the kernel takes."""
    for rounded in _rounded(sizes):
        problem = problem_of(op, flags, rounded)
        if problem is not None and _legal(kernel, problem, {}, device) is not None:
            return problem
    return None


def draw_case(
    data: st.DataObject, op: Op, kernel: Kernel, device: Device, pool: list[Variant], largest: int
) -> Case:
    """One example of a batch's variants."""
    variant = data.draw(st.sampled_from(pool), label="variant")
    problem = _taken(op, kernel, device, variant.flags, _sizes(data, op, largest))
    assume(problem is not None)
    config = _legal(kernel, problem, variant.config, device) or kernel.default(problem, device)
    return Case(
        op.name, kernel.name, problem.as_dict(), config.as_dict(), _distribution(data),
        data.draw(st.integers(0, 2**31), label="data_seed"), variant.layout, variant.offset,
        other_of(variant.other, op, kernel, problem, config, device),
    )  # fmt: skip


def empty_case(
    op: Op, kernel: Kernel, device: Device, pool: list[Variant], rng: random.Random
) -> Case | None:
    """A call of the op's public function with one size of 0, or more; None where there is none."""
    names = [
        name for name in op.dims if name in sizes_of(op) and name not in _FULL.get(op.name, ())
    ]
    for _ in range(0 if op.name in _NO_FUNCTION else TRIES):
        flags = rng.choice(pool).flags
        problem = problem_of(op, flags, {name: rng.randint(1, 100) for name in sizes_of(op)})
        if problem is None:
            continue
        fields = problem.as_dict()
        if fields.get("valid") is not None:
            fields["valid"] = min(fields["valid"], fields["n"])
        # A list of rows is one of rows that there are.
        open_names = [n for n in names if n != "m" or fields.get("rows") is None]
        empty = rng.sample(open_names, rng.randint(1, len(open_names)))
        config = kernel.default(problem, device)
        return Case(op.name, kernel.name, {**fields, **dict.fromkeys(empty, 0)}, config.as_dict(),
                    data_seed=rng.getrandbits(31))  # fmt: skip
    return None


def huge_case(
    op: Op, kernel: Kernel, device: Device, pool: list[Variant], rng: random.Random
) -> Case | None:
    """An example with a matrix of more elements than 32 bits count; None where none is taken."""
    dims = [name for name in op.dims if name in sizes_of(op)]
    if len(dims) < 2:
        return None
    for _ in range(TRIES):
        variant, (long, wide) = rng.choice(pool), rng.sample(dims, 2)
        width = rng.choice(WIDTHS)
        sizes = dict.fromkeys(sizes_of(op), rng.choice((2, 16, 64)))
        sizes |= {wide: width, long: UNCOUNTED // width + rng.choice((1, 16, 100))}
        problem = _taken(op, kernel, device, variant.flags, sizes)
        if problem is None:
            continue
        config = _legal(kernel, problem, variant.config, device) or kernel.default(problem, device)
        return Case(op.name, kernel.name, problem.as_dict(), config.as_dict(),
                    data_seed=rng.getrandbits(31))  # fmt: skip
    return None


def _distribution(data: st.DataObject) -> str:
    names = st.sampled_from(list(DISTRIBUTIONS))
    drawn = data.draw(names, label="data")
    if data.draw(st.integers(0, 3), label="two") < 3:
        return drawn
    return f"{drawn}/{data.draw(names, label='second')}"


def other_of(
    other: Other | None, op: Op, kernel: Kernel, problem: Any, config: Any, device: Device
) -> Other | None:
    """The other kernel and its config for a problem; None where it takes none.

    None too where they are the kernel and config themselves.
    """
    from jetfire import ops

    if other is None:
        return None
    second = ops.get_kernel(op.name, other.kernel)
    theirs = _legal(second, problem, other.config, device) or _legal(second, problem, {}, device)
    if theirs is None or (second.name == kernel.name and theirs == config):
        return None
    return Other(second.name, theirs.as_dict())
