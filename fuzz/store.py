"""Failures as files, each enough to run its case again."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetfire.core.files import Unwritable, write
from jetfire.fuzz.case import Case, Failure
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireWarning, UsageError

SCHEMA = 1


@dataclass(frozen=True)
class Saved:
    """A failure as it was saved.

    Attributes:
        loaded: the files that its kernels came from, but for those in the tree.
        own: it was found by its ID in one's own folder, so that those files are one's own too.
    """

    case: Case
    kind: str
    message: str
    loaded: tuple[Path, ...]
    own: bool


def folder() -> Path:
    """Where failures are kept: ``$JETFIRE_FUZZ``, else the user's data folder."""
    import platformdirs

    given = os.environ.get("JETFIRE_FUZZ")
    return Path(given) if given else platformdirs.user_data_path("jetfire") / "fuzz"


def as_dict(failure: Failure) -> dict[str, Any]:
    return {
        "id": failure.case.id,
        "kind": failure.kind,
        "message": failure.message,
        "case": failure.case.as_dict(),
    }


def content(failure: Failure, device: Device, loaded: Sequence[Path]) -> dict[str, Any]:
    """What a failure's file holds."""
    return {
        "schema": SCHEMA,
        **as_dict(failure),
        "device": device.label,
        "interpreted": device.interpreted,
        "load": [str(file.resolve()) for file in loaded],
    }


def save(failure: Failure, device: Device, loaded: Sequence[Path]) -> None:
    """Write a failure's file; a folder that cannot be written is a warning, with what to write."""
    path = folder() / f"{failure.case.id}.json"
    saved = content(failure, device, loaded)
    try:
        write(path, json.dumps(saved, indent=1) + "\n", folders=True)
    except Unwritable as error:
        text = f"{error}; it would hold {json.dumps(saved)}"
        warnings.warn(text, JetfireWarning, stacklevel=2)


def find(name: str) -> Saved:
    """What was saved under an ID in one's own folder, or in a file (a path, or ``….json``).

    Raises:
        UsageError: there is none, or it is none of ours.
    """
    own = not name.endswith(".json") and Path(name).name == name
    path = folder() / f"{name}.json" if own else Path(name)
    try:
        content = json.loads(path.read_text())
        if content.get("schema") != SCHEMA:
            raise UsageError(f"{path}: expected a failure of schema {SCHEMA}")
        loaded = tuple(Path(file) for file in content["load"])
        return Saved(Case.parse(content["case"]), content["kind"], content["message"], loaded, own)
    except OSError as error:
        raise UsageError(f"--reproduce {name}: {path}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a failure that jetfire-fuzz saved ({error})") from None
