"""Tensors in files, of which all is checked before it is read, and tensors put into a model."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from jetfire.core import files
from jetfire.core.errors import UsageError
from jetfire.core.files import MIB, Unreadable, Unwritable
from jetfire.nn import is_int4_state, weights_changed
from jetfire.nn.products import is_dtensor

# Bytes of a header: that of the largest preset's optimizer has 0.2 MB.
HEADER = 16 * MIB
THRESHOLD = ".fallback.threshold"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,200}")


class Kind(NamedTuple):
    """A tensor's dtype as the format names it (``F32``), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(map(str, self.shape)) or 'scalar'}"


def kind_of(value: torch.Tensor) -> Kind:
    """Return a tensor's kind as a safetensors file has it.

    What such a file could not hold has a dtype that none has.
    """
    plain = value.layout is torch.strided and value.device.type == "cpu"
    dtype = _DTYPES.get(value.dtype, str(value.dtype)) if plain else f"{value.layout}"
    return Kind(dtype, tuple(value.shape))


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


def load_pickled(file: Path) -> dict[str, torch.Tensor]:
    """A state dict that torch saved; nothing in it is run.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no state dict, or its tensors are packed and may be of any size.
    """
    with files.opened(file) as opened:
        if zipfile.is_zipfile(opened):
            _check_unpacked(opened, file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damage makes the unpickler raise
        reason = _line(error) or type(error).__name__
        raise Unreadable(file, f"cannot read the weights: {reason}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise Unreadable(file, "cannot read the weights: expected names and tensors")
    return found


def _check_unpacked(opened: Any, file: Path) -> None:
    """Refuse an archive that is damaged, or would be larger unpacked."""
    try:
        with zipfile.ZipFile(opened) as archive:
            packed = any(part.file_size != part.compress_size for part in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise Unreadable(file, f"cannot read the weights: {error}") from None
    if packed:
        raise Unreadable(
            file, "cannot read the weights: expected them as torch saves them, unpacked"
        )


def save(
    tensors: Mapping[str, torch.Tensor], file: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file of a folder that is not in its place yet (`files.new_folder`)."""
    try:
        save_file(dict(tensors), file, metadata)
    except (OSError, SafetensorError) as error:
        raise Unwritable(file, OSError(0, _line(error))) from None


def _line(error: Exception) -> str:
    """An error of the library in a line, without what a hostile file may have it repeat."""
    text = " ".join(str(error).split())
    return "".join(char if char.isprintable() else "?" for char in text)[:200]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, which all processes must ask for; any other as it is."""
    if not is_dtensor(tensor):
        return tensor
    sharded: Any = tensor
    gathered: torch.Tensor = sharded.full_tensor()
    return gathered


def as_sharded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that every process has whole, sharded as another is."""
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    there = tensor.to(like.device)
    return distribute_tensor(there, sharded.device_mesh, sharded.placements, src_data_rank=None)


def of_recipe(name: str) -> bool:
    """Return whether a state's entry is a recipe's own: an INT4 layer's group, a threshold."""
    return is_int4_state(name) or name.endswith(THRESHOLD)


def load_model(model: nn.Module, values: Mapping[str, torch.Tensor], where: Path) -> None:
    """Put parameters back; every name and shape must agree.

    But a recipe's own, `of_recipe`, may be absent on either side: another recipe has none, and
    where there are none training sets them.
    """
    own = model.state_dict()
    given = {name: value for name, value in values.items() if name in own or not of_recipe(name)}
    steps = {name for name in own if of_recipe(name)}
    for name in [*own, *given]:
        if name in steps and not steps & given.keys():
            continue
        there = tuple(given[name].shape) if name in given else "absent"
        wanted = tuple(own[name].shape) if name in own else "absent"
        if there != wanted:
            raise UsageError(f"{where}: {name} is {there}: the model's is {wanted}")
        if name in given and of_recipe(name) and not bool(given[name].isfinite().all()):
            raise UsageError(f"{where}: {name} holds NaN or Inf: expected finite numbers")
    model.load_state_dict({name: as_sharded(value, own[name]) for name, value in given.items()})
    weights_changed()  # of a sharded weight the layers see no change
