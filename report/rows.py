"""Choices among result rows, which the tables and charts have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from jetfire.core import registry
from jetfire.core.profiles import Entry
from jetfire.measure.results import Row

T = TypeVar("T")


@cache
def ops_of(part: str) -> tuple[str, ...]:
    """Return the names of the ops that a part of the results measures."""
    timed = {name: registry.get(name).timed() or () for name in registry.names()}
    return tuple(name for name, found in timed.items() if any(t.part == part for t in found))


def ratio(row: Row | None, *peers: str) -> float | None:
    """Return the time of a peer, or of the fastest of several, over a row's: above 1 is faster."""
    of = (row.vs_peer if row is not None else None) or {}
    return min((of[peer] for peer in peers if peer in of), default=None)


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row of the shortest time; None where none was timed."""
    timed = [row for row in rows if row.ms is not None]
    return min(timed, key=lambda row: row.ms or 0.0, default=None)


def having(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """Return the rows whose problems have these fields."""
    return [row for row in rows if fields.items() <= row.problem.items()]


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return the values by key, in the order of each key's first value."""
    found: dict[Any, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def varying(rows: Sequence[Row | Entry]) -> tuple[dict[str, Any], list[str]]:
    """Return the problem fields that rows, or profiles, share, and the names of those that differ.

    Sizes are in neither.
    """
    names = dict.fromkeys(name for row in rows for name in row.problem)
    values = {
        name: {str(row.problem.get(name)) for row in rows}
        for name in names
        if name not in ("m", "n", "k")
    }
    shared = {name: rows[0].problem.get(name) for name, found in values.items() if len(found) == 1}
    return shared, [name for name in values if name not in shared]
