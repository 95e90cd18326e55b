"""A model's weights from and to a folder as `transformers` keeps them.

Theirs are named by a family's `Layout`, `transformer.h.N.attn.c_attn.weight` of GPT-2. Ours:
`blocks.N.qkv.weight`, out×in, and the tables of all tokens padded to a multiple of 64 rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.nn import functional as F
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable
from jetfire.core.schema import Name, Plain
from jetfire.gpt2.model import tensors
from jetfire.gpt2.model.language_model import LanguageModel
from jetfire.gpt2.model.layouts import LAYOUTS, Layout, shape_of
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.model.tensors import Kind

State = dict[str, torch.Tensor]
CONFIG, MODEL, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
# What has a row for each token, padded as `Shape.rows` has them. The model never predicts those.
_TABLES = ("tokens.weight", "head.weight")
_HEAD = "lm_head.weight"


class _Index(TypedDict):
    """Weights' names, and the file of the folder that each is in."""

    weight_map: Annotated[dict[str, Name], Field(max_length=100_000)]


def read_transformers(folder: Path) -> tuple[Shape, State]:
    """The sizes, and parameters by our names, fp32 on the CPU."""
    try:
        shape = shape_of(folder / CONFIG)
        theirs = _weights(folder, shape)
    except Missing as error:
        families = " or ".join(layout.title for layout in LAYOUTS.values())
        raise UsageError(
            f"{error}: expected a folder of transformers' {families}, with {CONFIG} and {MODEL} or "
            f"{PICKLED}"
        ) from None
    layout, state = LAYOUTS[shape.family], State()
    for ours, (name, transposed) in layout.names(shape).items():
        value = theirs.pop(name).detach().to(torch.float32)
        state[ours] = value.T.contiguous() if transposed else value.contiguous()
    head, table = theirs.get(_HEAD), state["tokens.weight"]
    if head is not None and not torch.equal(head.to(torch.float32), table):
        name = layout.outside["tokens.weight"]
        raise UsageError(f"{folder}: {_HEAD} is not {name}: expected a tied head")
    for name in _TABLES & state.keys():
        state[name] = F.pad(state[name], (0, 0, 0, shape.rows - len(table)))
    return shape, state


def _weights(folder: Path, shape: Shape) -> State:
    """The folder's weights by their names without the prefix, of which all are of the shape.

    Raises:
        Missing, Unreadable: a file is missing, damaged, or does not hold just those.
    """
    parts = list(_parts(folder))
    found = {} if parts else tensors.load_pickled(folder / PICKLED)
    kinds = {name: tensors.kind_of(value) for name, value in found.items()}
    for part in parts:
        kinds |= tensors.header(part)
    _check(kinds, shape, parts[0] if parts else folder / PICKLED)
    for part in parts:
        found |= tensors.load(part)
    prefix = LAYOUTS[shape.family].prefix
    return {name.removeprefix(prefix): value for name, value in found.items()}


def load(model: LanguageModel, folder: Path) -> None:
    """Initialise a model of any recipe; a shorter context takes the first positions."""
    given, state = read_transformers(folder)
    shape = model.shape
    wanted = dataclasses.replace(given, context=shape.context, dropout=shape.dropout)
    if wanted != shape or shape.context > given.context:
        has = dataclasses.replace(given, dropout=shape.dropout)  # which may differ
        raise UsageError(f"{folder}: has {_sizes(has)}; the model expects {_sizes(shape)}")
    if "positions.weight" in state:
        state["positions.weight"] = state["positions.weight"][: shape.context]
    tensors.load_model(model, state, folder)


def _sizes(shape: Shape) -> str:
    """The sizes as a text, the context last."""
    found = {**dataclasses.asdict(shape), "family": shape.family}
    found["context"] = found.pop("context")
    return ", ".join(f"{name}={size}" for name, size in found.items())


def check_replaceable(folder: Path) -> None:
    """Check that `save_transformers` would write over nothing there but an earlier export.

    Its config.json tells an export. The weights beside it may be of another model, as an export
    leaves them that was killed while it took the place of an earlier one.

    Raises:
        UsageError: it would write over something else.
    """
    taken = [name for name in (CONFIG, MODEL) if os.path.lexists(folder / name)]
    if taken and not _is_export(folder):
        reason = f"its {taken[0]} is of no earlier export"
        raise UsageError(f"-o {folder}: {reason}: expected a new or empty folder")


def _is_export(folder: Path) -> bool:
    """Return whether a folder's config.json is just what an export of its sizes writes."""
    try:
        shape = shape_of(folder / CONFIG)
        found: Any = schema.load(folder / CONFIG, Plain)
        return bool(found == LAYOUTS[shape.family].described(shape))
    except Unreadable:
        return False


def save_transformers(folder: Path, shape: Shape, state: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors, which `from_pretrained` of their class reads.

    Args:
        state: parameters by our names, of any dtype and device.

    Raises:
        UsageError: the folder cannot be written.
    """
    theirs, layout = {}, LAYOUTS[shape.family]
    for ours, (name, transposed) in layout.names(shape).items():
        value = state[ours].detach().to("cpu", torch.float32)
        if ours in _TABLES:
            value = value[: shape.vocabulary]
        prefix = "" if name == _HEAD else layout.prefix
        theirs[prefix + name] = (value.T if transposed else value).contiguous()
    config = layout.described(shape)
    with files.new_files(folder) as part:
        tensors.save(theirs, part / MODEL, {"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _check(found: Mapping[str, Kind], shape: Shape, file: Path) -> None:
    """See that weights are those of a shape, before a byte of them is read."""
    layout: Layout = LAYOUTS[shape.family]
    sizes = shape.parameters()
    sizes |= dict.fromkeys(_TABLES & sizes.keys(), (shape.vocabulary, shape.width))
    wanted = {
        theirs: sizes[ours][::-1] if transposed else sizes[ours]
        for ours, (theirs, transposed) in layout.names(shape).items()
    }
    there = {name.removeprefix(layout.prefix): kind for name, kind in found.items()}
    for name, size in wanted.items():
        if name not in there:
            reason = f"no weight {name}: expected {len(wanted)} as {layout.title} has"
            raise Unreadable(file, reason)
        if there[name].shape != size or there[name].dtype not in ("F64", "F32", "F16", "BF16"):
            expected = Kind("floats", size)
            raise Unreadable(file, f"{name} is {there[name]}: expected {expected} as {CONFIG} says")
    # Buffers, in files of older versions, and the head, which is the embedding table.
    for name in there.keys() - wanted.keys():
        if not name.endswith(layout.buffers) and name != _HEAD:
            reason = f"weight {ascii(name)[:100]} has no place in {layout.title}"
            reason += "" if "head.weight" in sizes else " with a tied head"
            raise Unreadable(file, f"{reason}: expected {len(wanted)} others")


def _parts(folder: Path) -> Iterator[Path]:
    """The folder's safetensors files; none where it has none."""
    if (folder / INDEX).is_file():
        index = schema.load(folder / INDEX, _Index)
        yield from (folder / part for part in sorted(set(index["weight_map"].values())))
    elif (folder / MODEL).is_file():
        yield folder / MODEL
