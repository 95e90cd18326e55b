"""Tuned configs, in one JSON file per device and op, which `jetfire.tuner` makes.

`profiles/<device>/<op>.json` in the user's folder (JETFIRE_PROFILES, else the platform's data
folder) comes before the one shipped with the package. Files are read once per process; after
`forget` they are read anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from jetfire.core import environment, registry, schema
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import Missing, Unreadable, locked, write
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.core.schema import (
    LARGEST,
    Count,
    Digest,
    Fields,
    Line,
    Measured,
    Name,
    NotNegative,
    Ratios,
)

SCHEMA = 2
SHIPPED = Path(__file__).parent.parent / "profiles"
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


class Provenance(TypedDict, total=False):
    """The origin of a tuned config: whatever its times depend on beside the problem.

    Attributes:
        gpu: the device's name; capability: its compute capability, None on a CPU.
        cuda, torch, triton: versions of the software that compiled the kernel.
        source: `Kernel.source_hash` at that time; timer: the version of the bench's timer.
        date: the comparison's, in UTC and ISO 8601.
    """

    gpu: Line
    capability: tuple[int, int] | None
    driver: Line | None
    cuda: Line | None
    torch: Line
    triton: Line | None
    source: Line
    timer: Count
    date: Line
    jetfire: Line


@dataclass(frozen=True)
class Entry:
    """A tuned config, with the times of the tuner's final comparison.

    Attributes:
        default_ms: the default config's time; None where it failed.
        joules: joules per call; None where power could not be read, 0 where a counter of energy did
            not move within a short run.
        vs_peer: by peer, its time over the kernel's.
        provenance: as `measure.provenance.of` makes it.
        digest: the SHA-256 of the outputs in the tuner's final comparison, for its seed and data;
            None in files from before there was one.
    """

    kernel: Name
    problem: Fields
    config: Fields
    ms: Measured
    ms_p20: Measured
    ms_p80: Measured
    samples: Count
    default_ms: Measured | None
    joules: NotNegative | None
    objective: Name
    vs_peer: Ratios
    trials: Count
    strategy: Name
    provenance: Provenance
    digest: Digest | None = None

    @property
    def gain(self) -> float | None:
        """The default's time over the config's, or None where the default failed."""
        return None if self.default_ms is None else self.default_ms / self.ms

    @property
    def gpu(self) -> str:
        """Return the name of the device that it was tuned on."""
        return self.provenance.get("gpu", "")


@dataclass(frozen=True)
class _File:
    """A saved profile, whose entries name their provenance by a key of the table."""

    provenance: dict[Name, Provenance]
    entries: Annotated[list[dict[str, Any]], Field(max_length=20_000)]


@dataclass(frozen=True)
class Found:
    """A config, and where it comes from.

    Attributes:
        stale: the kernel's source has changed since.
        same_shape: the entry's problem has the sizes of this one, whatever its other fields.
        distance: from the entry's problem, as `find` measures it; a default is its own problem's.
    """

    config: Any
    source: Source
    entry: Entry | None = None
    stale: bool = False
    same_shape: bool = True
    distance: float = EXACT


_Function = TypeVar("_Function", bound=Callable[..., Any])
_clearers: list[Callable[[], None]] = []


def remembered(function: _Function) -> _Function:
    """Cache a function that depends on profiles, by `functools.lru_cache`; `forget` empties it."""
    cached = lru_cache(maxsize=4096)(function)
    _clearers.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def when_forgotten(clear: Callable[[], None]) -> None:
    """Have `forget` call a function too."""
    _clearers.append(clear)


def forget() -> None:
    """Empty all caches, so that profiles are read, and kernels chosen, anew."""
    for clear in _clearers:
        clear()


# Files.


def user_folder() -> Path:
    """Return the folder that `jetfire tune` writes: JETFIRE_PROFILES, else in the user's data."""
    if set_by_user := os.environ.get("JETFIRE_PROFILES"):
        return Path(set_by_user)
    import platformdirs

    return platformdirs.user_data_path("jetfire") / "profiles"


@cache
def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_slug(device: Device) -> str:
    """Return the folder name of a device, such as ``nvidia-h200``."""
    return _slug(device.name)


def path(folder: Path, device: Device, op: str) -> Path:
    return folder / device_slug(device) / f"{op}.json"


@remembered
def files() -> tuple[Path, ...]:
    """Return every profile there is, the user's first."""
    folders = dict.fromkeys((user_folder().absolute(), SHIPPED))
    return tuple(file for folder in folders for file in sorted(folder.glob("*/*.json")))


@remembered
def read(file: Path) -> tuple[Entry, ...]:
    """Return a profile's entries; skip a file that cannot be used, with one warning."""
    try:
        return _parsed(file)
    except Unreadable as error:
        warnings.warn(f"profile {file} skipped: {error.reason}", JetfireWarning, stacklevel=2)
        return ()


def _parsed(file: Path) -> tuple[Entry, ...]:
    """Return a file's entries, none where there is no file.

    Raises:
        Unreadable: it is no profile.
    """
    try:
        content = schema.load(file, _File, version=SCHEMA)
    except Missing:
        return ()
    return tuple(_entry(raw, content.provenance, file) for raw in content.entries)


def _entry(raw: dict[str, Any], table: Mapping[str, Provenance], file: Path) -> Entry:
    key = raw.get("provenance")
    if not isinstance(key, str) or key not in table:
        raise Unreadable(file, f"an entry's provenance {str(key)[:80]!r} is missing")
    return schema.convert({**raw, "provenance": table[key]}, Entry, file)


# Lookup.


@dataclass(frozen=True)
class _Tuned:
    """An entry of a kernel, as this version reads it.

    Attributes:
        own: it is of the device itself, not of another of its architecture.
        sort, place: its problem's (`_sort_of`, `_place`).
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


@cache
def _timed_fields(kind: Any) -> tuple[str, ...]:
    """Return a problem's fields but extras and floats: no time depends on an eps or a decay."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(name for name in names if hints[name] is not float and name not in kind.extras)


def _sort_of(problem: Any) -> tuple[Any, ...]:
    """Return the field values that problems of the same time share: one entry serves them all."""
    kind: Any = type(problem)
    return tuple(getattr(problem, name) for name in _timed_fields(kind))


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
    slug = device_slug(device)
    any_of_it = device.capability is not None and device.name == "sm_{}{}".format(
        *device.capability
    )
    for own in (True, False) if device.capability else (True,):
        for file in files():
            if file.stem == op and (file.parent.name == slug) is own:
                for entry in read(file):
                    if own or entry.provenance.get("capability") == device.capability:
                        yield entry, own or any_of_it


@remembered
def _tuned(op: Op, kernel: Kernel, device: Device) -> dict[tuple[Any, ...], list[_Tuned]]:
    """Return the entries of a kernel of an op for a device, by their problems' kind."""
    found: dict[tuple[Any, ...], list[_Tuned]] = {}
    for entry, own in _entries(op.name, device):
        if entry.kernel != kernel.name:
            continue
        problem, config = _meant(op.Problem, entry.problem), _meant(kernel.Config, entry.config)
        if problem is None or config is None:
            continue
        typed = dataclasses.replace(entry, problem=problem.as_dict(), config=config.as_dict())
        stale = entry.provenance.get("source") != kernel.source_hash()
        tuned = _Tuned(typed, own, config, stale, _sort_of(problem), _place(op, problem))
        found.setdefault(_kind(op, problem), []).append(tuned)
    return found


def _meant(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return the problem or config of some fields; None where this version does not know them."""
    try:
        found = kind.parse(fields)
    except (UsageError, TypeError, ValueError, OverflowError):
        return None
    return None if any(isinstance(v, int) and v > LARGEST for v in vars(found).values()) else found


def _candidates(
    op: Op, kernel: Kernel, problem: Any, device: Device, farthest: float
) -> Iterator[Found]:
    """Yield legal configs, nearest first; those tuned for exactly this problem are `EXACT` away."""
    sort, kind, place = _sort_of(problem), _kind(op, problem), _place(op, problem)
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


def state(op: str, entry: Entry) -> str:
    """Return ``stale`` where the kernel's source has changed, ``no kernel`` where it is gone."""
    kernel = registry.kernels(op).get(entry.kernel)
    if kernel is None:
        return "no kernel"
    return "" if kernel.source_hash() == entry.provenance.get("source") else "stale"


def strict() -> bool:
    """Return whether a problem that was not tuned is an error: JETFIRE_STRICT_PROFILE is on.

    Raises:
        UsageError: the variable is neither on nor off.
    """
    return environment.switch(STRICT, default=False)


# Writing.


def save(folder: Path, device: Device, op: Op, entries: Sequence[Entry]) -> Path:
    """Add entries to a device's profile of an op, in place of those for the same problems.

    The file is written whole or not at all, by one process at a time. A file that cannot be read is
    kept beside it as ``<op>.json.old``, or ``.old-2`` where there is one already.

    Raises:
        UsageError: the file cannot be written; its content is as before.
    """
    file = path(folder, device, op.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), wait=True):
            merged = {_identity(op, entry): entry for entry in (*_held(file), *entries)}
            text = _text(device, op.name, list(merged.values()))
            write(file, text, alone=True)
    except OSError as error:
        raise UsageError(f"cannot write profile {file}: {error.strerror or error}") from None
    forget()
    return file


def _held(file: Path) -> tuple[Entry, ...]:
    try:
        return _parsed(file)
    except Unreadable as error:
        old = _unused(file.with_suffix(".json.old"))
        os.replace(file, old)
        text = f"profile {file} kept as {old.name}: {error.reason}"
        warnings.warn(text, JetfireWarning, stacklevel=3)
        return ()


def _unused(file: Path) -> Path:
    """Return the file, numbered where there is one already."""
    names = itertools.chain(
        [file], (file.with_name(f"{file.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def _identity(op: Op, entry: Entry) -> tuple[str, Any]:
    problem = _meant(op.Problem, entry.problem)
    if problem is None:
        return entry.kernel, json.dumps(entry.problem, sort_keys=True)
    return entry.kernel, _sort_of(problem)


def _order(entry: Entry) -> tuple[Any, ...]:
    """Return an entry's sort key, for any types of fields: numbers first, by value."""
    fields = entry.problem.items()
    return entry.kernel, [
        (name, False, value, "") if isinstance(value, int | float) else (name, True, 0, str(value))
        for name, value in fields
    ]


def _text(device: Device, op: str, entries: Sequence[Entry]) -> bytes:
    """Return a profile as JSON with a line per entry and per provenance."""
    table: dict[str, str] = {}
    lines = []
    for entry in sorted(entries, key=_order):
        origin = _line(entry.provenance)
        key = hashlib.sha256(origin.encode()).hexdigest()[:8]
        table[key] = origin
        lines.append(_line({**dataclasses.asdict(entry), "provenance": key}))
    head = {
        "schema": SCHEMA,
        "device": device.name,
        "capability": list(device.capability) if device.capability else None,
        "op": op,
    }
    return "".join(
        [
            _line(head)[:-1],
            ',\n"provenance": {\n',
            ",\n".join(f'"{key}": {table[key]}' for key in sorted(table)),
            '\n},\n"entries": [\n',
            ",\n".join(lines),
            "\n]}\n",
        ]
    ).encode()


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
