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
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from jetfire.core import registry, schema
from jetfire.core.device import Device
from jetfire.core.errors import JetfireWarning, UsageError
from jetfire.core.files import Missing, Unreadable, locked, write
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


def check_folder() -> None:
    """Refuse a JETFIRE_PROFILES that is no folder; it need not exist yet.

    Commands that measure ask this. A model's lookup passes over it and takes shipped profiles.

    Raises:
        UsageError: it is a file, or cannot be read.
    """
    given = os.environ.get("JETFIRE_PROFILES")
    try:
        if given:
            os.listdir(given)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"JETFIRE_PROFILES={given}: expected a folder: {error.strerror}") from None


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


# What entries are of.


def meant(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return the problem or config of some fields; None where this version does not know them."""
    try:
        found = kind.parse(fields)
    except (UsageError, TypeError, ValueError, OverflowError):
        return None
    return None if any(isinstance(v, int) and v > LARGEST for v in vars(found).values()) else found


@cache
def _timed_fields(kind: Any) -> tuple[str, ...]:
    """Return a problem's fields but extras and floats: no time depends on an eps or a decay."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(name for name in names if hints[name] is not float and name not in kind.extras)


def sort_of(problem: Any) -> tuple[Any, ...]:
    """Return the field values that problems of the same time share: one entry serves them all."""
    kind: Any = type(problem)
    return tuple(getattr(problem, name) for name in _timed_fields(kind))


def state(op: str, entry: Entry) -> str:
    """Return ``stale`` where the kernel's source has changed, ``no kernel`` where it is gone."""
    kernel = registry.kernels(op).get(entry.kernel)
    if kernel is None:
        return "no kernel"
    return "" if kernel.source_hash() == entry.provenance.get("source") else "stale"


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
    problem = meant(op.Problem, entry.problem)
    if problem is None:
        return entry.kernel, json.dumps(entry.problem, sort_keys=True)
    return entry.kernel, sort_of(problem)


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
