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
from typing import Any, Literal, get_args, get_origin

from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.functions import called
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.core.problem import hints_of, is_size
from jetfire.core.workloads import RAGGED
from jetfire.fuzz.example import TALL, UNCOUNTED, Example, Other
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
MOST_OF_TALL = 2**26  # bytes that they move at the least
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
        against: the kernel that its outputs are compared with.
    """

    op: Op
    kernel: Kernel
    device: Device
    extent: FuzzExtent = FuzzExtent()
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


def _flag(name: str, annotation: Any, rng: random.Random) -> Any:
    if isinstance(annotation, UnionType):  # `int | None`: whether there is one
        return rng.choice((None, 1))
    if get_origin(annotation) is Literal:
        return rng.choice(get_args(annotation))
    if annotation is bool:
        return rng.random() < 0.5
    return rng.choice(FLOATS.get(name, FRACTIONS))


def problem_of(op: Op, flags: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """A problem of flags and of the sizes that they leave open; None where there is none."""
    open_sizes = {k: v for k, v in sizes.items() if k not in flags}
    try:
        return op.Problem.parse(op.fitted({**open_sizes, **flags}))
    except UsageError:
        return None


def sizes_of(op: Op) -> list[str]:
    return [name for name, hint in hints_of(op.Problem).items() if is_size(hint)]


def usual(op: Op, kernel: Kernel, device: Device) -> FuzzExtent | None:
    """Return how much is drawn if nothing else is asked for; None where the kernel does not run."""

    def runs(where: Device) -> bool:
        """Return whether it takes any problem of some that are tried."""
        return Draws(FuzzTarget(op, kernel, where), random.Random(0)).typical() is not None

    if not runs(device):
        return None
    if device.kind == "cuda":
        return ON_A_GPU
    plain = dataclasses.replace(device, interpreted=False)
    return FuzzExtent() if plain == device or runs(plain) else INTERPRETED


def _legal(kernel: Kernel, problem: Any, fields: Mapping[str, Any], device: Device) -> Any:
    """The config of some fields, the others as by default; None where it is illegal."""
    config = dataclasses.replace(kernel.default(problem, device), **fields)
    return config if kernel.legal(problem, config, device) is None else None


@cache
def _primes(largest: int) -> list[int]:
    return [n for n in range(2, largest + 1) if all(n % i for i in range(2, int(n**0.5) + 1))]


class Draws:
    """What is drawn for a target: the same for the same state of the generator."""

    def __init__(self, target: FuzzTarget, rng: random.Random) -> None:
        self._target, self._rng = target, rng
        self._op, self._kernel, self._device = target.op, target.kernel, target.device

    # Flags, configs and layouts.

    def typical(self) -> tuple[dict[str, Any], Any] | None:
        """Flags, and a problem of them that the kernel takes, of a size that any should."""
        fields = hints_of(self._op.Problem)
        for _ in range(TRIES):
            drawn = {k: _flag(k, hint, self._rng) for k, hint in fields.items() if hint is not int}
            flags = {k: v for k, v in drawn.items() if not (is_size(fields[k]) and v is not None)}
            for size in (128, 256, 1024):
                problem = problem_of(self._op, flags, dict.fromkeys(sizes_of(self._op), size))
                if problem is not None and _legal(self._kernel, problem, {}, self._device):
                    return flags, problem
        return None

    def variants(self) -> list[Variant]:
        """Draw defaults in a plain layout, then configs and layouts, of two sets of flags.

        Empty where the kernel takes none of what was tried: it is for another device.
        """
        found: list[Variant] = []
        while len(found) < VARIANTS and (typical := self.typical()) is not None:
            flags, problem = typical
            found.append(Variant(flags, other=self._other(problem)))
            found += [self._varied(flags, problem) for _ in range(VARIANTS // 2 - 1)]
        return found

    def _varied(self, flags: dict[str, Any], problem: Any) -> Variant:
        config, layout = self._config(self._kernel, problem), self._layout(problem)
        return Variant(flags, config, layout, self._rng.choice(OFFSETS), self._other(problem))

    def _config(self, kernel: Kernel, problem: Any) -> dict[str, Any]:
        """Fields of a legal config from the space; none, after some tries."""
        space = kernel.space(problem, self._device)
        for _ in range(TRIES if space else 0):
            fields = {name: self._rng.choice(list(values)) for name, values in space.items()}
            if _legal(kernel, problem, fields, self._device) is not None:
                return fields
        return {}

    def _layout(self, problem: Any) -> dict[str, tuple[int, int]]:
        """Draw how far apart each input's rows are, and how far it is moved, where a caller may."""
        found = {}
        for name, spec in self._op.reads(problem).items():
            strided = len(spec.shape) == 2 and name not in self._op.contiguous
            padding = self._rng.choice(PADDINGS) if strided else 0
            found[name] = (padding, self._rng.choice(OFFSETS))
        return {name: moved for name, moved in found.items() if any(moved)}

    def _other(self, problem: Any) -> Other | None:
        """Return what to compare with: the kernel asked for, else half the time another config."""
        against = self._target.against
        if against is not None:
            return Other(against.name, self._config(against, problem))
        if self._rng.random() < 0.5:
            return None
        fields = self._config(self._kernel, problem)
        return Other(self._kernel.name, fields) if fields else None

    # Sizes.

    def _size(self, largest: int) -> int:
        """Draw a size: around a multiple of a tile, a small one, a prime, or any."""
        rng, kind = self._rng, self._rng.randrange(5)
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

    def _sizes(self, shape: str, largest: int) -> dict[str, int]:
        """Draw each dimension: any; all whole; all about the same; one large, the others small."""
        rng, dims = self._rng, self._op.dims
        if shape == "skinny":
            unit, long = rng.choice((1, *MULTIPLES)), rng.randint(largest, SKINNY * largest)
            size = max(1, long // unit * unit + rng.choice((-1, 0, 1)))
            return self._long(rng.choice(dims), size)
        if shape == "whole":
            # Multiples of 16 and of tiles: what kernels have faster ways for.
            units = [unit for unit in MULTIPLES if unit <= largest] or [1]
            each = ((rng.choice(units), name) for name in dims)
            sizes = {name: unit * rng.randint(1, largest // unit) for unit, name in each}
            return self._with_others(sizes)
        if shape == "near":
            size = self._size(largest)
            return self._with_others({name: max(1, size + rng.randint(-2, 2)) for name in dims})
        return self._with_others({name: self._size(largest) for name in dims})

    def _about_tiles(self, config: Mapping[str, Any], largest: int) -> dict[str, int] | None:
        """Draw some of a config's tiles of each dimension, or nearly so; those without are small.

        None where the config has no tiles.
        """
        dims = self._op.dims
        found = {name: config.get(f"tile_{name}", config.get("tile")) for name in dims}
        tiles = {name: tile for name, tile in found.items() if tile is not None}
        if not tiles:
            return None
        sizes = {name: self._size(THIN) for name in dims}
        for name, tile in tiles.items():
            about = tile * self._rng.choice((1, 1, 2, 3, 5, 9)) + self._rng.choice((-1, 0, 1, 5))
            sizes[name] = min(max(1, about), SKINNY * largest)
        return self._with_others(sizes)

    def _long(self, long: str, size: int) -> dict[str, int]:
        """Draw small sizes beside one that stays as it is."""
        small = {name: self._size(THIN) for name in self._op.dims}
        return self._with_others({**small, long: size})

    def _with_others(self, sizes: dict[str, int]) -> dict[str, int]:
        """Add sizes that a problem may do without: about one of its own, or any up to that."""
        for name in sizes_of(self._op):
            if name not in sizes:
                size = sizes[self._rng.choice(self._op.dims)]
                near = max(1, size + self._rng.randint(-2, 2))
                sizes[name] = near if self._rng.random() < 0.5 else self._rng.randint(1, size)
        return sizes

    def _taken(self, flags: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        """The first problem that the kernel takes: of sizes, of one rounded up, of all of them."""
        up = {unit: {k: -(-v // unit) * unit for k, v in sizes.items()} for unit in (16, 128)}
        each = ({**sizes, name: size} for name, size in up[16].items())
        for rounded in (sizes, *each, *up.values()):
            problem = problem_of(self._op, flags, rounded)
            if problem is not None and _legal(self._kernel, problem, {}, self._device) is not None:
                return problem
        return None


class Batch(Draws):
    """The cases of one batch, the same for the same target, number and state of the generator."""

    def __init__(self, target: FuzzTarget, number: int, rng: random.Random) -> None:
        super().__init__(target, rng)
        self._number, self._pool = number, self.variants()

    def cases(self, count: int) -> Iterator[Example]:
        """Yield so many cases, or none where the kernel takes no problem on the device.

        The first is a call with empty tensors where there is one, the second a tall problem.
        """
        if not self._pool:
            return
        empty = [self._empty] if self._target.against is None else []
        firsts = empty + ([self._tall] if self._target.extent.tall else [])
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
        rng, op = self._rng, self._op
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
        if self._target.compiled or (typical := self.typical()) is None:
            return self._rng.choice(self._pool)
        if self._rng.random() < 0.5:
            return self._varied(*typical)
        flags, problem = typical
        return Variant(flags, other=self._other(problem))

    def _any(self) -> Example | None:
        largest = self._target.extent.largest
        for _ in range(TRIES):
            variant, shape = self._variant(), self._rng.choice(SHAPES)
            case = self._case(variant, self._sizes(shape, largest))
            if case is not None and shape == "tiles":
                sizes = self._about_tiles(case.config, largest)
                case = self._case(variant, sizes) if sizes else case
            if case is not None:
                return case
        return None

    def _tall(self) -> Example | None:
        """Draw one size about 2^16, 2^17 or 2^15, each dimension's in turn; the others small."""
        op, turn = self._op, self._number
        for _ in range(TRIES):
            long, size = op.dims[turn % len(op.dims)], TALL[turn // len(op.dims) % len(TALL)]
            sizes = self._long(long, size + self._rng.choice((-2, -1, 0, 1, 33, 300)))
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
        op, kernel, device = self._op, self._kernel, self._device
        problem = self._taken(variant.flags, sizes)
        if problem is None:
            return None
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
        op, rng = self._op, self._rng
        names = [d for d in op.dims if d in sizes_of(op) and d not in op.never_empty]
        for _ in range(TRIES if names else 0):
            flags = rng.choice(self._pool).flags
            problem = problem_of(op, flags, {name: rng.randint(1, 100) for name in sizes_of(op)})
            if problem is None or called(op, problem.as_dict()) is None:
                continue
            empty = dict.fromkeys(rng.sample(names, rng.randint(1, len(names))), 0)
            return Example(
                op.name,
                self._kernel.name,
                {**problem.as_dict(), **empty},
                self._kernel.default(problem, self._device).as_dict(),
                data_seed=rng.getrandbits(31),
            )
        return None


def other_of(
    other: Other | None, op: Op, kernel: Kernel, problem: Any, config: Any, device: Device
) -> Other | None:
    """The other kernel and its config for a problem; None where it takes none.

    None too where they are the kernel and config themselves.
    """
    if other is None:
        return None
    second = registry.get_kernel(op.name, other.kernel)
    theirs = _legal(second, problem, other.config, device) or _legal(second, problem, {}, device)
    if theirs is None or (second.name == kernel.name and theirs == config):
        return None
    return Other(second.name, theirs.as_dict())
