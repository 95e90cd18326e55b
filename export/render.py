"""Generated code: jinja2 templates beside this file, and beside CUDA kernels."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"
KERNELS = Path(__file__).parent.parent / "kernels_cuda"
LICENCE = Path(__file__).parent.parent / "LICENSE"


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader([TEMPLATES, KERNELS]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> bytes:
    """Fill a template with these values; it is an error to use one that is not there."""
    return _environment().get_template(template).render(**values).encode()


def licence() -> bytes:
    """The text that goes with every export."""
    return LICENCE.read_bytes()
