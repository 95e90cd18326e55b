"""Short texts for numbers and fields, the same in every table, chart and page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fields_text(fields: Mapping[str, Any]) -> str:
    """Return ``tile_m=128 stages=3``, each value as Python writes it."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
