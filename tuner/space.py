"""The configs that a search may choose from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jetfire.core.device import Device
from jetfire.core.errors import unknown
from jetfire.core.kernel import Config, Kernel

# A product of up to WHOLE configs is asked for its legal ones in 0.2 s. Of a larger one (the Hopper
# GEMM's has 138 240) a search looks at POOL random ones and at the neighbours of its best.
WHOLE = 20_000
POOL = 2_000
Point = tuple[int, ...]


class Space:
    """Config fields with the values to try, and the judge of their combinations.

    A point is a config as the rank of each field's value.

    Args:
        fields: name → values; fields of one value are kept at it.
        base: gives the fields that are not searched.
        reason: why a config is illegal, or None: `Kernel.legal`.
        points: all that are legal, in order, where that is known.
    """

    def __init__(
        self,
        fields: Mapping[str, Sequence[Any]],
        base: Config,
        reason: Callable[[Config], str | None],
        points: Sequence[Point] | None = None,
    ) -> None:
        self.fields = {name: tuple(values) for name, values in fields.items()}
        self.base = base
        self.reason = reason
        self._points = points
        self._legal: dict[Point, bool] = {}
        self._counts = [len(values) for values in self.fields.values()]

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        problem: Any,
        device: Device,
        limits: Mapping[str, Sequence[str]] | None = None,
    ) -> Space:
        """Return a kernel's space for a problem, with fields limited to some values.

        Raises:
            UsageError: a limit names no field of the space, or no value of it.
        """
        fields = {name: tuple(v) for name, v in kernel.space(problem, device).items()}
        for name, texts in (limits or {}).items():
            if name not in fields:
                raise unknown(f"--space {name}: {kernel.name} does not search it", name, fields)
            values = {str(value).lower(): value for value in fields[name]}
            for text in texts:
                if text.lower() not in values:
                    raise unknown(f"--space {name}={text}", text, values)
            fields[name] = tuple(dict.fromkeys(values[text.lower()] for text in texts))
        base = kernel.default(problem, device)
        return cls(fields, base, lambda config: kernel.legal(problem, config, device))

    @property
    def size(self) -> int:
        """Combinations, legal or not."""
        return math.prod(self._counts)

    def config(self, point: Point) -> Config:
        return dataclasses.replace(self.base, **self.parameters(point))

    def parameters(self, point: Point) -> dict[str, Any]:
        """Return the searched fields alone."""
        return {n: v[i] for (n, v), i in zip(self.fields.items(), point, strict=True)}

    def point(self, parameters: Mapping[str, Any]) -> Point | None:
        """Return the point of a config's fields; None where it lies outside."""
        try:
            return tuple(v.index(parameters[n]) for n, v in self.fields.items())
        except (KeyError, ValueError):
            return None

    def has(self, point: Point) -> bool:
        """Return whether it is a rank of each field."""
        return len(point) == len(self._counts) and all(
            0 <= rank < count for rank, count in zip(point, self._counts, strict=True)
        )

    def legal(self, point: Point) -> bool:
        if point not in self._legal:
            self._legal[point] = self.reason(self.config(point)) is None
        return self._legal[point]

    def points(self) -> Iterator[Point]:
        """Return every legal point, in order."""
        if self._points is not None:
            return iter(self._points)
        every = itertools.product(*map(range, self._counts))
        return (point for point in every if self.legal(point))

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Yield the legal points that differ in one field."""
        for axis, count in enumerate(self._counts):
            for i in range(count):
                other = (*point[:axis], i, *point[axis + 1 :])
                if i != point[axis] and self.legal(other):
                    yield other

    @cached_property
    def whole(self) -> bool:
        """`pool` holds every legal point."""
        return self._points is not None or self.size <= WHOLE

    @cached_property
    def pool(self) -> list[Point]:
        """Every legal point where that is quick to find out, else some random ones."""
        if self.whole:
            return list(self.points())
        # One pool for all seeds: what a search finds depends on the seed only by its choices.
        rng = np.random.default_rng(0)
        found: dict[Point, None] = {}
        for _ in range(20):  # where fewer than one in 200 is legal, the pool is smaller
            drawn = rng.integers(self._counts, size=(WHOLE, len(self._counts)))
            for point in map(tuple, drawn.tolist()):
                if self.legal(point):
                    found[point] = None
                if len(found) == POOL:
                    return list(found)
        return list(found)

    def unit(self, points: Iterable[Point]) -> np.ndarray:
        """Return points in the unit cube: ranks over the highest; n×fields, float64."""
        highest = np.array([max(count - 1, 1) for count in self._counts], dtype=np.float64)
        return np.array(list(points), dtype=np.float64).reshape(-1, len(highest)) / highest
