"""What is drawn: variants of a kernel that a batch shares, and the cases of each.

To compile costs a second and more, to run some milliseconds. So where kernels are compiled a batch
of examples has a few variants, each of flags, a config and a layout, all of which a kernel may be
compiled for; sizes, values and seeds are drawn for every example. Elsewhere all is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.functions import called
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.core.workloads import RAGGED
from jetfire.fuzz.example import Example, Other
from jetfire.measure.data import DISTRIBUTIONS

VARIANTS = 4  # of a batch, where kernels are compiled
# Batches of one length before they get four times as long; fewer where over MANY examples are asked
# for. In batches of 25 an example takes 0.8 s of a core (`jetfire-fuzz` on an H200), most of it for
# compiling.
GROWS, MANY, GROWS_OF_MANY = 20, 2000, 5
TRIES = 60  # at flags that the op and the kernel take together, at a legal config or problem
# Of fields that are no integers, by name: where arithmetic changes, and between.
FLOATS: dict[str, tuple[float, ...]] = {
    "beta1": (0.0, 0.5, 0.9, 0.99),
    "beta2": (0.0, 0.9, 0.95, 0.99, 0.999, 0.9999),
    "decay": (0.0, 0.01, 0.1, 1.0),
    "eps": (1e-12, 1e-8, 1e-5, 1e-3, 0.1, 1.0),
    "p": (0.0, 2.0**-18, 2.0**-16, 0.1, 0.5, 0.9, 1 - 2.0**-15, 1 - 2.0**-16, 1 - 2.0**-18),
}
FRACTIONS = (1e-5, 0.1, 0.5, 0.9)  # of others
PADDINGS = (0, 1, 3, 8, 16, 40)
OFFSETS = (0, 1, 2, 4, 8, 16)
MULTIPLES = (16, 32, 64, 128, 256)
SHAPES = (*["any"] * 3, *["whole"] * 3, "near", "skinny", *["tiles"] * 2)
SKINNY = 8  # times the largest size, where the others are below `THIN`
THIN = 17
# Of tall problems: what counts of rows, of programs in a grid and of 16 bits end at.
TALL = (2**16, 2**17, 2**15)
MOST_OF_TALL = 2**26  # bytes that they move at the least
UNCOUNTED = 2**31  # elements of a matrix, beyond which 32 bits do not count them
WIDTHS = (33, 128, 1000, 4097, 50257, 2**17 + 1, 2**20)  # of huge matrices, or their heights


@dataclass(frozen=True)
class FuzzExtent:
    """How much is drawn for a kernel.

    Attributes:
        examples: in all; None for as many as there is time for.
        largest: the largest size, but for skinny, tall and huge problems.
        batch: examples that are drawn together, in the first batches.
        tall: some problems have 2^16 rows.
    """

    examples: int | None = 500
    largest: int = 400
    batch: int = 25
    tall: bool = True

    def given(self, examples: int | None, largest: int | None) -> FuzzExtent:
        """Return this extent with what is not None in place of its own."""
        return dataclasses.replace(
            self, examples=examples or self.examples, largest=largest or self.largest
        )

    def batches(self) -> Iterator[tuple[int, int]]:
        """Return each batch's number and how many examples it has.

        After every twenty, or every five where many examples are asked for, they are four times as
        long: once a kernel has been compiled for many variants, a second of compiling finds less
        than a second of sizes and values.
        """
        left: float = math.inf if self.examples is None else self.examples
        grows = GROWS_OF_MANY if MANY < left < math.inf else GROWS
        for number in itertools.count():
            wanted = int(min(left, self.batch * 4 ** (number // grows)))
            if not wanted:
                return
            yield number, wanted
            left -= wanted


ON_A_GPU = FuzzExtent(examples=200, largest=2048)
# A program costs some milliseconds there, an example a third of a second, 2^16 rows minutes.
INTERPRETED = FuzzExtent(examples=60, largest=130, batch=10, tall=False)


@dataclass(frozen=True)
class FuzzTarget:
    """What examples are drawn for.

    Attributes:
        largest, tall: a FuzzExtent's.
        against: the kernel that its outputs are compared with.
    """

    op: Op
    kernel: Kernel
    device: Device
    largest: int = 400
    tall: bool = True
    against: Kernel | None = None

    @property
    def compiled(self) -> bool:
        """Whether a variant of a kernel costs a compilation."""
        return self.device.kind == "cuda"


@dataclass(frozen=True)
class Variant:
    """What a kernel may be compiled for, but for sizes.

    Attributes:
        flags: fields of the Problem that are no sizes; None in place of a size that is optional.
        config: fields that differ from the default's.
        layout, offset, other: an Example's; of `other`, too, the fields that differ.
    """

    flags: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: dict[str, tuple[int, int]] = field(default_factory=dict)
    offset: int = 0
    other: Other | None = None


@cache
def _fields(op: Op) -> dict[str, Any]:
    return get_type_hints(op.Problem)


def _is_size(annotation: Any) -> bool:
    return annotation is int or isinstance(annotation, UnionType)


def _flag(name: str, annotation: Any, rng: random.Random) -> Any:
    if isinstance(annotation, UnionType):  # `int | None`: whether there is one
        return rng.choice((None, 1))
    if get_origin(annotation) is Literal:
        return rng.choice(get_args(annotation))
    if annotation is bool:
        return rng.random() < 0.5
    return rng.choice(FLOATS.get(name, FRACTIONS))


def _flags(op: Op, rng: random.Random) -> dict[str, Any]:
    drawn = {k: _flag(k, hint, rng) for k, hint in _fields(op).items() if hint is not int}
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


def usual(op: Op, kernel: Kernel, device: Device) -> FuzzExtent | None:
    """Return how much is drawn if nothing else is asked for; None where the kernel does not run."""
    if not _runs(op, kernel, device):
        return None
    if device.kind == "cuda":
        return ON_A_GPU
    plain = dataclasses.replace(device, interpreted=False)
    return FuzzExtent() if plain == device or _runs(op, kernel, plain) else INTERPRETED


def _runs(op: Op, kernel: Kernel, device: Device) -> bool:
    """Return whether a kernel takes any problem of some that are tried."""
    return _typical(FuzzTarget(op, kernel, device), random.Random(0)) is not None


def variants(target: FuzzTarget, rng: random.Random) -> list[Variant]:
    """Draw a batch's: defaults in a plain layout, then configs and layouts of two sets of flags.

    Empty where the kernel takes none of what was tried: it is for another device.
    """
    found: list[Variant] = []
    while len(found) < VARIANTS:
        typical = _typical(target, rng)
        if typical is None:
            break
        flags, problem = typical
        found.append(Variant(flags, other=_other(target, problem, rng)))
        found += [_variant(target, typical, rng) for _ in range(VARIANTS // 2 - 1)]
    return found


def _typical(target: FuzzTarget, rng: random.Random) -> tuple[dict[str, Any], Any] | None:
    """Flags, and a problem of them that the kernel takes, of a size that any should."""
    op = target.op
    for _ in range(TRIES):
        flags = _flags(op, rng)
        for size in (128, 256, 1024):
            problem = problem_of(op, flags, dict.fromkeys(sizes_of(op), size))
            if problem is not None and _legal(target.kernel, problem, {}, target.device):
                return flags, problem
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
    target: FuzzTarget, typical: tuple[dict[str, Any], Any], rng: random.Random
) -> Variant:
    flags, problem = typical
    return Variant(
        flags,
        _config(target.kernel, problem, target.device, rng),
        _layout(target.op, problem, rng),
        rng.choice(OFFSETS),
        _other(target, problem, rng),
    )


def _layout(op: Op, problem: Any, rng: random.Random) -> dict[str, tuple[int, int]]:
    """Draw how far apart each input's rows are, and how far it is moved, where a caller may."""
    found = {}
    for name, spec in op.reads(problem).items():
        strided = len(spec.shape) == 2 and name not in op.contiguous
        padding = rng.choice(PADDINGS) if strided else 0
        found[name] = (padding, rng.choice(OFFSETS))
    return {
        name: (padding, offset) for name, (padding, offset) in found.items() if padding or offset
    }


def _other(target: FuzzTarget, problem: Any, rng: random.Random) -> Other | None:
    """Return what to compare with: the kernel asked for, else half the time another config."""
    kernel, against = target.kernel, target.against
    if against is not None:
        return Other(against.name, _config(against, problem, target.device, rng))
    if rng.random() < 0.5:
        return None
    fields = _config(kernel, problem, target.device, rng)
    return Other(kernel.name, fields) if fields else None


@cache
def _primes(largest: int) -> list[int]:
    return [n for n in range(2, largest + 1) if all(n % i for i in range(2, int(n**0.5) + 1))]


def _size(largest: int, rng: random.Random) -> int:
    """Draw a size: around a multiple of a tile, a small one, a prime, or any."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randint(1, min(largest, THIN))
    if kind == 1:
        unit = rng.choice(MULTIPLES)
        near = unit * rng.randint(1, largest // unit + 1) + rng.choice((-1, 0, 1))
        return max(1, min(largest, near))
    if kind == 2:
        return rng.choice(_primes(largest) or [1])
    if kind == 3:
        return rng.choice([size for size in RAGGED if size <= largest])
    return rng.randint(1, largest)


def _whole(largest: int, rng: random.Random) -> int:
    """A multiple of 16 and of tiles: what kernels have faster ways for."""
    unit = rng.choice([unit for unit in MULTIPLES if unit <= largest] or [1])
    return unit * rng.randint(1, largest // unit)


def _sizes(op: Op, shape: str, largest: int, rng: random.Random) -> dict[str, int]:
    """Draw each dimension's: any; all whole; all about the same; one large, the others small."""
    if shape == "skinny":
        unit, long = rng.choice((1, *MULTIPLES)), rng.randint(largest, SKINNY * largest)
        size = max(1, long // unit * unit + rng.choice((-1, 0, 1)))
        return _long(op, rng.choice(op.dims), size, rng)
    if shape == "whole":
        return _with_others(op, {name: _whole(largest, rng) for name in op.dims}, rng)
    if shape == "near":
        size = _size(largest, rng)
        return _with_others(op, {name: max(1, size + rng.randint(-2, 2)) for name in op.dims}, rng)
    return _with_others(op, {name: _size(largest, rng) for name in op.dims}, rng)


def _about_tiles(
    op: Op, tiles: Mapping[str, int], largest: int, rng: random.Random
) -> dict[str, int]:
    """Draw some tiles of each dimension, or nearly so; those without are small."""
    sizes = {name: _size(THIN, rng) for name in op.dims}
    for name, tile in tiles.items():
        about = tile * rng.choice((1, 1, 2, 3, 5, 9)) + rng.choice((-1, 0, 1, 5))
        sizes[name] = min(max(1, about), SKINNY * largest)
    return _with_others(op, sizes, rng)


def _tiles(op: Op, config: Mapping[str, Any]) -> dict[str, int]:
    """The tile of each dimension that a config has one for."""
    found = {name: config.get(f"tile_{name}", config.get("tile")) for name in op.dims}
    return {name: tile for name, tile in found.items() if tile is not None}


def _long(op: Op, long: str, size: int, rng: random.Random) -> dict[str, int]:
    """Draw small sizes beside one that stays as it is."""
    small = {name: _size(THIN, rng) for name in op.dims}
    return _with_others(op, {**small, long: size}, rng)


def _with_others(op: Op, sizes: dict[str, int], rng: random.Random) -> dict[str, int]:
    """Add sizes that a problem may do without: about one of its own, or any up to that."""
    for name in sizes_of(op):
        if name not in sizes:
            size = sizes[rng.choice(op.dims)]
            near = max(1, size + rng.randint(-2, 2))
            sizes[name] = near if rng.random() < 0.5 else rng.randint(1, size)
    return sizes


def _rounded(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the sizes, then rounded up to what a kernel may want of one, then of all."""
    yield dict(sizes)
    for name, size in sizes.items():
        yield {**sizes, name: -(-size // 16) * 16}
    for unit in (16, 128):
        yield {name: -(-size // unit) * unit for name, size in sizes.items()}


def _taken(target: FuzzTarget, flags: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The first problem of those sizes, or of them rounded up, that the kernel takes."""
    for rounded in _rounded(sizes):
        problem = problem_of(target.op, flags, rounded)
        if problem is not None and _legal(target.kernel, problem, {}, target.device) is not None:
            return problem
    return None


class Batch:
    """The cases of one batch, the same for the same target, number and state of the generator."""

    def __init__(self, target: FuzzTarget, number: int, rng: random.Random) -> None:
        self._target, self._number, self._rng = target, number, rng
        self._pool = variants(target, rng)

    def cases(self, count: int) -> Iterator[Example]:
        """Yield so many cases, or none where the kernel takes no problem on the device.

        The first is a call with empty tensors where there is one, the second a tall problem.
        """
        if not self._pool:
            return
        empty = [self._empty] if self._target.against is None else []
        firsts = empty + ([self._tall] if self._target.tall else [])
        drawn = 0
        for draw in firsts[: count - 1]:
            if (case := draw()) is not None:
                drawn += 1
                yield case
        for _ in range(drawn, count):
            if (case := self._any()) is not None:
                yield case

    def huge(self) -> Example | None:
        """Draw a case with a matrix of more elements than 32 bits count; None if none is taken."""
        rng, op = self._rng, self._target.op
        dims = [name for name in op.dims if name in sizes_of(op)]
        for _ in range(TRIES if self._pool and len(dims) > 1 else 0):
            long, wide = rng.sample(dims, 2)
            width = rng.choice(WIDTHS)
            sizes = dict.fromkeys(sizes_of(op), rng.choice((2, 16, 64)))
            sizes |= {wide: width, long: UNCOUNTED // width + rng.choice((1, 16, 100))}
            variant = rng.choice(self._pool)
            case = self._case(Variant(variant.flags, variant.config), sizes)
            if case is not None:
                return dataclasses.replace(case, data="normal", edges=False)
        return None

    def _variant(self) -> Variant:
        """Choose one of the batch's variants; where nothing is compiled, another one."""
        if self._target.compiled or (typical := _typical(self._target, self._rng)) is None:
            return self._rng.choice(self._pool)
        if self._rng.random() < 0.5:
            return _variant(self._target, typical, self._rng)
        flags, problem = typical
        return Variant(flags, other=_other(self._target, problem, self._rng))

    def _any(self) -> Example | None:
        op, largest, rng = self._target.op, self._target.largest, self._rng
        for _ in range(TRIES):
            variant, shape = self._variant(), rng.choice(SHAPES)
            case = self._case(variant, _sizes(op, shape, largest, rng))
            if case is not None and shape == "tiles" and (tiles := _tiles(op, case.config)):
                case = self._case(variant, _about_tiles(op, tiles, largest, rng))
            if case is not None:
                return case
        return None

    def _tall(self) -> Example | None:
        """Draw one size about 2^16, 2^17 or 2^15, each dimension's in turn; the others small."""
        op, rng, turn = self._target.op, self._rng, self._number
        for _ in range(TRIES):
            long, size = op.dims[turn % len(op.dims)], TALL[turn // len(op.dims) % len(TALL)]
            sizes = _long(op, long, size + rng.choice((-2, -1, 0, 1, 33, 300)), rng)
            case = self._case(self._variant(), sizes)
            if case and op.bytes(op.Problem.parse(case.problem)) <= MOST_OF_TALL:
                return case
        return None

    def _data(self) -> str:
        """A distribution, or one time in four two of them; one time in 16 NaN and ±∞ for sure."""
        first, second = (self._rng.choice(list(DISTRIBUTIONS)) for _ in range(2))
        if self._rng.random() < 1 / 16:
            return "nonfinite"
        return f"{first}/{second}" if self._rng.random() < 0.25 else first

    def _case(self, variant: Variant, sizes: Mapping[str, int]) -> Example | None:
        """Return a case of a variant and sizes; None where the kernel takes no such problem."""
        problem = _taken(self._target, variant.flags, sizes)
        if problem is None:
            return None
        op, kernel, device = self._target.op, self._target.kernel, self._target.device
        config = _legal(kernel, problem, variant.config, device) or kernel.default(problem, device)
        return Example(
            op.name,
            kernel.name,
            problem.as_dict(),
            config.as_dict(),
            self._data(),
            self._rng.getrandbits(31),
            variant.layout,
            variant.offset,
            other_of(variant.other, op, kernel, problem, config, device),
            edges=self._rng.random() < 0.25,
        )

    def _empty(self) -> Example | None:
        """A call of the op's public function with one size of 0, or more."""
        op, rng = self._target.op, self._rng
        names = [d for d in op.dims if d in sizes_of(op) and d not in op.never_empty]
        for _ in range(TRIES if names else 0):
            flags = rng.choice(self._pool).flags
            problem = problem_of(op, flags, {name: rng.randint(1, 100) for name in sizes_of(op)})
            if problem is None or called(op, problem.as_dict()) is None:
                continue
            empty = dict.fromkeys(rng.sample(names, rng.randint(1, len(names))), 0)
            return Example(
                op.name,
                self._target.kernel.name,
                {**problem.as_dict(), **empty},
                self._target.kernel.default(problem, self._target.device).as_dict(),
                data_seed=rng.getrandbits(31),
            )
        return None


def other_of(
    other: Other | None, op: Op, kernel: Kernel, problem: Any, config: Any, device: Device
) -> Other | None:
    """The other kernel and its config for a problem; None where it takes none.

    None too where they are the kernel and config themselves.
    """
    from jetfire.core import registry

    if other is None:
        return None
    second = registry.get_kernel(op.name, other.kernel)
    theirs = _legal(second, problem, other.config, device) or _legal(second, problem, {}, device)
    if theirs is None or (second.name == kernel.name and theirs == config):
        return None
    return Other(second.name, theirs.as_dict())
