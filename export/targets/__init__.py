"""The forms that an export takes, by name: modules with their `TARGETS`."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetfire.export.target import ExportTarget

_MODULES = {
    "cuda": "c_library",
    "cubin": "c_library",
    "torch": "operators",
    "wheel": "operators",
    "hf": "operators",
}
NAMES = tuple(_MODULES)


@cache
def get(name: str) -> ExportTarget:
    """The target of a name."""
    module = importlib.import_module(f"jetfire.export.targets.{_MODULES[name]}")
    target: ExportTarget = module.TARGETS[name]
    return target
