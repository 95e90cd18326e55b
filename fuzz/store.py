"""Failures as files, each enough to run its case again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from jetfire.core import loaded, schema, terminal
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.files import MIB, Missing, Unwritable, write
from jetfire.core.schema import Line, Text, most
from jetfire.fuzz.example import Example, Failure, Kind

SCHEMA = 1
MOST = 4 * MIB  # bytes of a file
MESSAGE = 1 << 16  # characters of a failure's that are kept


@dataclass(frozen=True)
class Saved:
    """A failure as it was saved.

    Attributes:
        load: the files that its kernels came from, but for those in the tree.
        own: it was found by its ID in one's own folder, so that those files are one's own too.
    """

    case: Example
    kind: Kind
    message: Text
    load: Annotated[list[Line], most(100)]
    own: bool = False


def folder() -> Path:
    """Return where failures are kept: ``$JETFIRE_FUZZ``, else the user's data folder."""
    import platformdirs

    given = os.environ.get("JETFIRE_FUZZ")
    return Path(given) if given else platformdirs.user_data_path("jetfire") / "fuzz"


def as_dict(failure: Failure) -> dict[str, Any]:
    return {
        "id": failure.case.id,
        "kind": failure.kind,
        "message": terminal.visible(failure.message)[:MESSAGE],
        "case": failure.case.as_dict(),
    }


def content(failure: Failure, device: Device) -> dict[str, Any]:
    """Return what a failure's file holds."""
    return {
        "schema": SCHEMA,
        **as_dict(failure),
        "device": device.label,
        "interpreted": device.interpreted,
        "load": list(map(str, loaded.files())),
    }


def save(failure: Failure, device: Device) -> None:
    """Write a failure's file; where it cannot be written, print on stderr what it would hold."""
    path, saved = folder() / f"{failure.case.id}.json", content(failure, device)
    try:
        write(path, json.dumps(saved, indent=1) + "\n", folders=True)
    except Unwritable as error:
        terminal.note(f"{error}; it would hold the next line")
        terminal.details(json.dumps(saved))


def find(name: str) -> Saved:
    """Find what was saved by its ID in one's own folder, or in a file (a path, or ``….json``).

    Raises:
        UsageError: there is none, or it is none of ours.
    """
    own = not name.endswith(".json") and Path(name).name == name
    path = folder() / f"{name}.json" if own else Path(name)
    try:
        return replace(schema.load(path, Saved, MOST, SCHEMA), own=own)
    except Missing as error:
        raise UsageError(f"--reproduce {name}: {error}") from None
