"""Tuned configs, one JSON file a device and op: found here, written by `jetfire.tuner`.

`profiles/<device>/<op>.json` in the user's folder (JETFIRE_PROFILES, else the platform's data
folder) comes before the one shipped with the package. Files are read once a process; `forget` has
them read anew.
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

from jetfire.core import registry, schema
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import Missing, Unreadable, locked, write
from jetfire.core.kernel import Kernel
from jetfire.core.op import Op
from jetfire.core.schema import LARGEST, Count, Fields, Line, Measured, Name, NotNegative, Ratios

SCHEMA = 2
SHIPPED = Path(__file__).parent.parent / "profiles"
# In docs/results/h200-lookups.json 44 of 49 lookups are within 10% of tuning; with the default
# instead of what is more than 1 away it would be 42, and with nothing but the default 40.
FARTHEST = 4.0
# As far as a factor of 1.4 in one dimension.
OTHER_FIELD = 0.5
# A model of a kernel's time is no better than this.
MODEL_SLACK = 1.03
STRICT = "JETFIRE_STRICT_PROFILE"
Source = Literal["tuned", "nearest", "default"]


class Provenance(TypedDict, total=False):
    """What a tuned config's times depend on beside the problem.

    Attributes:
        gpu: the device's name; capability: its compute capability, None on a CPU.
        cuda, torch, triton: versions of what compiled the kernel.
        source: `Kernel.source_hash` as it was; timer: the version of the bench's timer.
        date: of the comparison, in UTC, as ISO 8601 writes it.
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
    """One tuned config; times are those of the tuner's final comparison.

    Attributes:
        default_ms: None where the default config failed.
        joules: of one call; None where power could not be read, 0 where a counter of energy did
            not move within a short run.
        vs_peer: name → the peer's time over the kernel's.
        provenance: as `provenance` gives it.
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

    @property
    def gain(self) -> float | None:
        """The default's time over the config's; None where the default failed."""
        return None if self.default_ms is None else self.default_ms / self.ms


@dataclass(frozen=True)
class _File:
    """A profile as it is saved: each entry names its provenance by a key of the table."""

    provenance: dict[Name, Provenance]
    entries: Annotated[list[dict[str, Any]], Field(max_length=20_000)]


@dataclass(frozen=True)
class Found:
    """A config, where it comes from, and whether the kernel's source has changed since."""

    config: Any
    source: Source
    entry: Entry | None = None
    stale: bool = False


_Function = TypeVar("_Function", bound=Callable[..., Any])
_clearers: list[Callable[[], None]] = []


def remembered(function: _Function) -> _Function:
    """`functools.lru_cache` for what depends on profiles: `forget` empties it."""
    cached = lru_cache(maxsize=4096)(function)
    _clearers.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def forget() -> None:
    """Have profiles read, and kernels chosen, anew."""
    for clear in _clearers:
        clear()


# Files.


def user_folder() -> Path:
    """Where `jetfire tune` writes: JETFIRE_PROFILES, else the platform's user data folder."""
    if set_by_user := os.environ.get("JETFIRE_PROFILES"):
        return Path(set_by_user)
    import platformdirs

    return platformdirs.user_data_path("jetfire") / "profiles"


@cache
def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def device_slug(device: Device) -> str:
    """The device's name as a folder: ``nvidia-h200``."""
    return _slug(device.name)


def path(folder: Path, device: Device, op: str) -> Path:
    return folder / device_slug(device) / f"{op}.json"


@remembered
def files() -> tuple[Path, ...]:
    """Every profile there is, the user's first."""
    folders = dict.fromkeys((user_folder().absolute(), SHIPPED))
    return tuple(file for folder in folders for file in sorted(folder.glob("*/*.json")))


@remembered
def read(file: Path) -> tuple[Entry, ...]:
    """The entries of a profile; a file that cannot be used is named in one warning and skipped."""
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
    entry: Entry
    problem: Any
    config: Any
    stale: bool
    place: tuple[float, ...]


@dataclass(frozen=True)
class _Index:
    """A kernel's entries on one device: by `_sort_of` problem, and by `Op.matched` fields."""

    exact: dict[Any, list[_Tuned]]
    alike: dict[tuple[Any, ...], list[_Tuned]]


@cache
def _other_fields(op: Op) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The fields of few values that are in neither `dims` nor `matched`, with the values."""
    hints = get_type_hints(op.Problem)
    names = [field.name for field in dataclasses.fields(op.Problem)]
    return tuple(
        (name, (False, True) if hints[name] is bool else get_args(hints[name]))
        for name in names
        if name not in (*op.dims, *op.matched)
        and (hints[name] is bool or get_origin(hints[name]) is Literal)
    )


@cache
def _timed_fields(kind: Any) -> tuple[str, ...]:
    """A problem's fields but for floats: no time depends on an eps, a probability or a decay."""
    hints = get_type_hints(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if hints[field.name] is not float)


def _sort_of(problem: Any) -> tuple[Any, ...]:
    """What a problem has in common with those that take as long: one profile is for them all."""
    kind: Any = type(problem)
    return tuple(getattr(problem, name) for name in _timed_fields(kind))


def _place(op: Op, problem: Any) -> tuple[float, ...]:
    """A problem as a point: log2 of each dimension, and a corner for each other field's value.

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


def _entries(op: str, slug: str) -> Iterator[Entry]:
    """Of one device, or of every one of an architecture, whose slug is ``sm-90``."""
    architecture = re.fullmatch(r"sm-\d+", slug)
    for file in files():
        if file.stem == op and (architecture or file.parent.name == slug):
            for entry in read(file):
                capability = entry.provenance.get("capability") or ()
                if not architecture or f"sm-{''.join(map(str, capability))}" == slug:
                    yield entry


@remembered
def _index(kernel: Kernel, slug: str) -> _Index:
    op = registry.get(kernel.op)
    index = _Index({}, {})
    for entry in _entries(kernel.op, slug):
        if entry.kernel != kernel.name:
            continue
        problem, config = _meant(op.Problem, entry.problem), _meant(kernel.Config, entry.config)
        if problem is None or config is None:
            continue
        typed = dataclasses.replace(entry, problem=problem.as_dict(), config=config.as_dict())
        stale = entry.provenance.get("source") != kernel.source_hash()
        tuned = _Tuned(typed, problem, config, stale, _place(op, problem))
        index.exact.setdefault(_sort_of(problem), []).append(tuned)
        index.alike.setdefault(_kind(op, problem), []).append(tuned)
    return index


def _meant(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return the problem or config of some fields; None where this version knows none such."""
    try:
        found = kind.parse(fields)
    except (UsageError, TypeError, ValueError, OverflowError):
        return None
    return None if any(isinstance(v, int) and v > LARGEST for v in vars(found).values()) else found


def _legal_by_distance(
    kernel: Kernel, problem: Any, device: Device, farthest: float
) -> Iterator[_Tuned]:
    op = registry.get(kernel.op)
    alike = _index(kernel, device_slug(device)).alike.get(_kind(op, problem), ())
    if not alike:
        return
    here = _place(op, problem)
    distances = sorted((math.dist(here, tuned.place), i) for i, tuned in enumerate(alike))
    for distance, i in distances:
        if distance > farthest:
            return
        if kernel.legal(problem, alike[i].config, device) is None:
            yield alike[i]


def exact(kernel: Kernel, problem: Any, device: Device) -> Found | None:
    """The config tuned for just this problem, whatever its floats, if there is one still legal."""
    for tuned in _index(kernel, device_slug(device)).exact.get(_sort_of(problem), ()):
        if kernel.legal(problem, tuned.config, device) is None:
            return Found(tuned.config, "tuned", tuned.entry, tuned.stale)
    return None


def find(kernel: Kernel, problem: Any, device: Device) -> Found:
    """The config tuned for a problem, else for the nearest one, else the kernel's default.

    Near is what differs by less than `FARTHEST`: the root of the sum of squares of each dimension's
    ratio as a log2, and `OTHER_FIELD` for each further field that differs. Passed over are configs
    that are illegal for the problem, that this version's kernel does not know, or that it expects
    to be slower than its default.
    """
    if found := exact(kernel, problem, device):
        return found
    for tuned in _legal_by_distance(kernel, problem, device, FARTHEST):
        same = same_shape(registry.get(kernel.op), problem, tuned.entry)
        if same or _promising(kernel, problem, tuned.config, device):
            return Found(tuned.config, "nearest", tuned.entry, tuned.stale)
    return Found(kernel.default(problem, device), "default")


def same_shape(op: Op, problem: Any, entry: Entry) -> bool:
    """An entry's problem has the sizes of this one, whatever its other fields."""
    return all(entry.problem[dim] == getattr(problem, dim) for dim in op.dims)


def _promising(kernel: Kernel, problem: Any, config: Any, device: Device) -> bool:
    """The kernel expects no less of a config than of its default, or has no opinion."""
    expected = kernel.estimate(problem, config, device)
    usual = kernel.estimate(problem, kernel.default(problem, device), device)
    return expected is None or usual is None or expected <= MODEL_SLACK * usual


def nearest(kernel: Kernel, problem: Any, device: Device, count: int) -> list[Entry]:
    """The entries nearest to a problem, however far, each with another config that is legal."""
    found: dict[Any, Entry] = {}
    for tuned in _legal_by_distance(kernel, problem, device, math.inf):
        if len(found) == count:
            break
        found.setdefault(tuned.config, tuned.entry)
    return list(found.values())


def state(op: str, entry: Entry) -> str:
    """``stale`` where the kernel's source has changed since, ``no kernel`` where it has gone."""
    kernel = registry.kernels(op).get(entry.kernel)
    if kernel is None:
        return "no kernel"
    return "" if kernel.source_hash() == entry.provenance.get("source") else "stale"


def strict() -> bool:
    """Whether a problem without a config tuned for it is an error: JETFIRE_STRICT_PROFILE=1."""
    return os.environ.get(STRICT) == "1"


# Writing.


def save(folder: Path, device: Device, op: str, entries: Sequence[Entry]) -> Path:
    """Put entries into a device's profile of an op, in place of those for the same problems.

    Written whole or not at all, and one process after another. A file there that cannot be read is
    kept beside it as ``<op>.json.old``, or ``.old-2`` where there is one already.

    Raises:
        UsageError: the file cannot be written; what it held is still there.
    """
    file = path(folder, device, op)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), wait=True):
            merged = {_identity(op, entry): entry for entry in (*_held(file), *entries)}
            write(file, _text(device, op, list(merged.values())), alone=True)
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
    """The file, numbered where there is one already."""
    names = itertools.chain(
        [file], (file.with_name(f"{file.name}-{i}") for i in itertools.count(2))
    )
    return next(name for name in names if not name.exists())


def _identity(op: str, entry: Entry) -> tuple[str, Any]:
    problem = _meant(registry.get(op).Problem, entry.problem)
    if problem is None:
        return entry.kernel, json.dumps(entry.problem, sort_keys=True)
    return entry.kernel, _sort_of(problem)


def _order(entry: Entry) -> tuple[Any, ...]:
    """Numbers by value and before all else, whatever another version's problem holds."""
    fields = entry.problem.items()
    return entry.kernel, [
        (name, False, value, "") if isinstance(value, int | float) else (name, True, 0, str(value))
        for name, value in fields
    ]


def _text(device: Device, op: str, entries: Sequence[Entry]) -> bytes:
    """JSON with a line for each entry and for each provenance."""
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
