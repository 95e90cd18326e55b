"""Which of the tuned configs a problem gets: its own, the nearest problem's, or the default.

`core.profiles` reads the entries. What is found is kept until `profiles.forget`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetfire.core import environment, profiles
from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.core.profiles import Entry

# The distance (`find`) of the farthest entry that is used. In docs/results/h200-lookups.json 44 of
# 49 lookups are within 10% of tuning. With the default in place of entries more than 1 away it
# would be 42, with the default alone 40.
FARTHEST = 4.0
# The same where the kernel can estimate its default's time, but not that of the entry's config. The
# config tuned for 128×1024×4096 on an H100 took 1.5 to 2.1 times as long as the default at
# 128×4096×7168, 128×7168×16384 and 128×7168×2048 on an H200 (`jetfire bench`, trials of `jetfire
# tune`).
UNKNOWN_FARTHEST = 1.0
# The distance of two problems that differ in one other field: a factor of 1.4 in a dimension.
OTHER_FIELD = 0.5
# The distance of an entry for exactly the problem, which comes before all others.
EXACT = -1.0
# The ratio of expected times that counts as equal: `Kernel.estimate` is no more accurate.
MODEL_SLACK = 1.03
STRICT = "JETFIRE_STRICT_PROFILE"
Source = Literal["tuned", "nearest", "default"]


@dataclass(frozen=True)
class Found:
    """A config, and where it comes from.

    Attributes:
        stale: the kernel's source has changed since.
        same_shape: the entry's problem has the sizes of this one, whatever its other fields.
        distance: how far the entry's problem is from this one, as `find` measures it; `EXACT` for
            a default.
    """

    config: Any
    source: Source
    entry: Entry | None = None
    stale: bool = False
    same_shape: bool = True
    distance: float = EXACT


@dataclass(frozen=True)
class _Tuned:
    """An entry of a kernel, as this version reads it.

    Attributes:
        own: it is of the device itself, not of another of its architecture.
        sort, place: `profiles.sort_of` and `_place` of the entry's problem.
    """

    entry: Entry
    own: bool
    config: Any
    stale: bool
    sort: tuple[Any, ...]
    place: tuple[float, ...]

    def distance(self, sort: tuple[Any, ...], place: tuple[float, ...]) -> float:
        """Return how far its problem is from one of the same kind."""
        if self.sort == sort:
            return EXACT
        return math.hypot(math.dist(self.place, place), 0.0 if self.own else OTHER_FIELD)


@cache
def _other_fields(op: Op) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the fields with few values that are not in `dims` or `matched`, with these values."""
    hints = get_type_hints(op.Problem)
    names = [field.name for field in dataclasses.fields(op.Problem)]
    return tuple(
        (name, (False, True) if hints[name] is bool else get_args(hints[name]))
        for name in names
        if name not in (*op.dims, *op.matched, *op.Problem.extras)
        and (hints[name] is bool or get_origin(hints[name]) is Literal)
    )


def _place(op: Op, problem: Any) -> tuple[float, ...]:
    """Return a problem as a point: log2 of each dimension, and a corner per other field's value.

    Two values of a field are `OTHER_FIELD` apart.
    """
    corner = OTHER_FIELD / math.sqrt(2)
    return (
        *(math.log2(getattr(problem, dim)) for dim in op.dims),
        *(
            corner * (getattr(problem, name) == value)
            for name, values in _other_fields(op)
            for value in values
        ),
    )


def _kind(op: Op, problem: Any) -> tuple[Any, ...]:
    return tuple(getattr(problem, name, None) for name in op.matched)


def _entries(op: str, device: Device) -> Iterator[tuple[Entry, bool]]:
    """Yield an op's entries: the device's own (True), then those of its architecture's others.

    A device that stands for an architecture (``sm_90``) has all of these as its own.
    """
    slug = profiles.device_slug(device)
    any_of_it = device.capability is not None and device.name == "sm_{}{}".format(
        *device.capability
    )
    for own in (True, False) if device.capability else (True,):
        for file in profiles.files():
            if file.stem == op and (file.parent.name == slug) is own:
                for entry in profiles.read(file):
                    if own or entry.provenance.get("capability") == device.capability:
                        yield entry, own or any_of_it


@profiles.remembered
def _tuned(op: Op, kernel: Kernel, device: Device) -> dict[tuple[Any, ...], list[_Tuned]]:
    """Return the entries of a kernel of an op for a device, by their problems' kind."""
    found: dict[tuple[Any, ...], list[_Tuned]] = {}
    for entry, own in _entries(op.name, device):
        if entry.kernel != kernel.name:
            continue
        problem = profiles.meant(op.Problem, entry.problem)
        config = profiles.meant(kernel.Config, entry.config)
        if problem is None or config is None:
            continue
        typed = dataclasses.replace(entry, problem=problem.as_dict(), config=config.as_dict())
        stale = entry.provenance.get("source") != kernel.source_hash()
        tuned = _Tuned(typed, own, config, stale, profiles.sort_of(problem), _place(op, problem))
        found.setdefault(_kind(op, problem), []).append(tuned)
    return found


def _candidates(
    op: Op, kernel: Kernel, problem: Any, device: Device, farthest: float
) -> Iterator[Found]:
    """Yield legal configs, nearest first; those tuned for exactly this problem are `EXACT` away."""
    sort, kind, place = profiles.sort_of(problem), _kind(op, problem), _place(op, problem)
    entries = _tuned(op, kernel, device).get(kind, ())
    ranked = [(tuned.distance(sort, place), tuned) for tuned in entries]
    for distance, tuned in sorted(ranked, key=lambda one: one[0]):
        if distance > farthest:
            return
        if kernel.legal(problem, tuned.config, device) is None:
            source: Source = "tuned" if distance == EXACT and tuned.own else "nearest"
            sizes = tuned.entry.problem
            same = all(sizes[dim] == getattr(problem, dim) for dim in op.dims)
            yield Found(tuned.config, source, tuned.entry, tuned.stale, same, distance)


def exact(op: Op, kernel: Kernel, problem: Any, device: Device) -> Found | None:
    """Return the config tuned for exactly this problem but for floats, or None if none is legal."""
    found = known(op, kernel, problem, device)
    return found if found and found.source == "tuned" else None


def known(
    op: Op, kernel: Kernel, problem: Any, device: Device, gpu: str | None = None
) -> Found | None:
    """Return what `exact` does, else what was tuned on another device of the architecture.

    An H100 has an H200's multiprocessors, and few profiles of its own are shipped for it. The
    source of what is another's is ``nearest``.

    Args:
        gpu: where it is to have been tuned; None for any device.
    """
    for found in _candidates(op, kernel, problem, device, EXACT):
        if gpu is None or (found.entry is not None and found.entry.gpu == gpu):
            return found
    return None


def find(op: Op, kernel: Kernel, problem: Any, device: Device) -> Found:
    """Return the config tuned for a problem, else for the nearest one, else the kernel's default.

    A problem that was tuned on another device of the architecture comes first of the nearest. The
    distance of two problems is the root of a sum of squares: log2 of each dimension's ratio, and
    `OTHER_FIELD` for each further field that differs, and for another device. The nearest one is
    within `FARTHEST`. Skipped are configs that are illegal for the problem, that this version's
    kernel does not know, or that it expects to be slower than its default. One whose time it cannot
    estimate must be within `UNKNOWN_FARTHEST`, if it can estimate the default's.
    """
    for found in _candidates(op, kernel, problem, device, FARTHEST):
        if found.same_shape or _promising(kernel, problem, found, device):
            return found
    return Found(kernel.default(problem, device), "default")


def _promising(kernel: Kernel, problem: Any, found: Found, device: Device) -> bool:
    """Return whether a config may be as fast as the kernel's default, as far as it can tell."""
    expected = kernel.estimate(problem, found.config, device)
    usual = kernel.estimate(problem, kernel.default(problem, device), device)
    if usual is None:
        return True
    if expected is None:
        return found.distance <= UNKNOWN_FARTHEST
    return expected <= MODEL_SLACK * usual


def nearest(op: Op, kernel: Kernel, problem: Any, device: Device, count: int) -> list[Entry]:
    """Return the entries nearest to a problem, however far, with legal and different configs."""
    found: dict[Any, Entry] = {}
    for one in _candidates(op, kernel, problem, device, math.inf):
        if len(found) == count:
            break
        if one.entry is not None:
            found.setdefault(one.config, one.entry)
    return list(found.values())


def strict() -> bool:
    """Return whether a problem that was not tuned is an error: JETFIRE_STRICT_PROFILE is on.

    Raises:
        UsageError: the variable is neither on nor off.
    """
    return environment.switch(STRICT, default=False)
