"""Files of tensors: what their headers say, before anything of them is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from jetfire.core import files
from jetfire.core.files import MIB, Unreadable, Unwritable

# Bytes of a header: that of the largest preset's optimizer has 0.2 MB.
HEADER = 16 * MIB
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,200}")


class Kind(NamedTuple):
    """A tensor's dtype as the format names it (``F32``), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(map(str, self.shape)) or 'scalar'}"


def header(file: Path) -> dict[str, Kind]:
    """Return the kinds of a safetensors file's tensors by name.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no such file, or damaged.
    """
    with files.opened(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > HEADER:
        raise Unreadable(file, f"a header of {length} bytes: expected at most {HEADER}")
    try:
        with safe_open(file, "pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            found = {n: Kind(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise Unreadable(file, f"no whole safetensors file: {_line(error)}") from None
    for name in found:
        if not _NAME.fullmatch(name):
            raise Unreadable(
                file, f"a tensor {ascii(name)[:100]}: expected letters, digits and _./-"
            )
    return found


def load(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        Missing, Unreadable: see `header`.
    """
    header(file)
    try:
        return load_file(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise Unreadable(file, f"no whole safetensors file: {_line(error)}") from None


def save(
    tensors: Mapping[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file of a folder that is not in its place yet (`files.new_folder`).

    Raises:
        Unwritable: a full disk, a lack of rights.
    """
    try:
        save_file(dict(tensors), file, metadata)
    except (OSError, SafetensorError) as error:
        raise Unwritable(file, OSError(0, _line(error))) from None


def _line(error: Exception) -> str:
    """An error of the library in a line, without what a hostile file may have it repeat."""
    text = " ".join(str(error).split())
    return "".join(char if char.isprintable() else "?" for char in text)[:200]
