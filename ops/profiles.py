"""Tuned configs, one JSON file a device and op: found here, written by `jetfire.tuner`.

`profiles/<device>/<op>.json` in the user's folder (JETFIRE_PROFILES, else the platform's data
folder) comes before the one shipped with the package.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.op import Kernel

SCHEMA = 1
SHIPPED = Path(__file__).parent.parent / "profiles"
Source = Literal["tuned", "default"]


def user_folder() -> Path:
    """Where `jetfire tune` writes: JETFIRE_PROFILES, else the platform's user data folder."""
    if set_by_user := os.environ.get("JETFIRE_PROFILES"):
        return Path(set_by_user)
    import platformdirs

    return platformdirs.user_data_path("jetfire") / "profiles"


def device_slug(device: Device) -> str:
    """The device's name as a folder: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")


def path(folder: Path, device: Device, op: str) -> Path:
    return folder / device_slug(device) / f"{op}.json"


@cache
def read(file: Path) -> tuple[dict[str, Any], ...]:
    """The entries of a profile; a file that cannot be used is named in one warning and skipped."""
    try:
        if not file.exists():
            return ()
        content = json.loads(file.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, this version reads {SCHEMA}")
        entries = tuple(content["entries"])
        for entry in entries:
            _ = entry["kernel"], entry["problem"], dict(entry["config"])
        return entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"profile {file} skipped: {error}", stacklevel=2)
        return ()


def lookup(kernel: Kernel, problem: Any, device: Device) -> tuple[Any, Source]:
    """The config for a problem, and whether it was tuned for just this problem or is the default.

    A tuned config that is no longer legal is passed over.
    """
    fields = problem.as_dict()
    for folder in (user_folder(), SHIPPED):
        for entry in read(path(folder, device, kernel.op)):
            if entry["kernel"] == kernel.name and entry["problem"] == fields:
                try:
                    config = kernel.Config.parse(entry["config"])
                except UsageError:
                    continue
                if kernel.legal(problem, config, device) is None:
                    return config, "tuned"
    return kernel.default(problem, device), "default"
