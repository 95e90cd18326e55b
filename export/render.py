"""Files of exports: generated from templates here and beside CUDA kernels, or copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import jetfire
from jetfire.core.checkout import commit

TEMPLATES = Path(__file__).parent / "templates"
FILES = Path(__file__).parent / "files"
KERNELS = Path(__file__).parent.parent / "kernels_cuda"
LICENCE = Path(__file__).parent.parent / "LICENSE"
# What a comment begins with, by a file's ending or name.
_COMMENTS = {
    **dict.fromkeys((".c", ".cpp", ".cu", ".h"), "//"),
    **dict.fromkeys((".py", ".toml", ".nix", ".mk", "Makefile", "CMakeLists.txt"), "#"),
}


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


def static(name: str) -> bytes:
    """Return a file that is copied as it stands."""
    return (FILES / name).read_bytes()


def stamped(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files of which every source begins with its licence and what wrote it."""
    revision = commit()
    by = f"Written by jetfire {jetfire.__version__}" + (
        f", commit {revision}." if revision else "."
    )

    def head(name: str) -> bytes:
        sign = _COMMENTS.get(Path(name).suffix, _COMMENTS.get(Path(name).name))
        return f"{sign} SPDX-License-Identifier: MIT\n{sign} {by}\n".encode() if sign else b""

    return {name: head(name) + content for name, content in files.items()}


def licence() -> bytes:
    """The text that goes with every export."""
    return LICENCE.read_bytes()
