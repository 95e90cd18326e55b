"""GPT-2's weights from and to a folder as `transformers` keeps them.

Theirs: `transformer.h.N.attn.c_attn.weight` and so on, each linear layer a Conv1D (in×out). Ours:
`blocks.N.qkv.weight`, out×in, and the embedding table padded to a multiple of 64 rows.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch.nn import functional as F
from typing_extensions import TypedDict

from jetfire.core import files, schema
from jetfire.core.errors import UsageError
from jetfire.core.files import Missing, Unreadable
from jetfire.core.schema import Name
from jetfire.gpt2.data.tokenizers import GPT2_VOCABULARY
from jetfire.gpt2.model import tensors
from jetfire.gpt2.model.config import SAME, read_shape
from jetfire.gpt2.model.shape import Shape
from jetfire.gpt2.model.tensors import Kind

if TYPE_CHECKING:
    from jetfire.gpt2.model.gpt2 import GPT2

State = dict[str, torch.Tensor]
CONFIG, MODEL, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)

_OUTER = {
    "tokens.weight": "wte.weight",
    "positions.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_LINEARS = {
    "qkv": "attn.c_attn",
    "projection": "attn.c_proj",
    "expand": "mlp.c_fc",
    "contract": "mlp.c_proj",
}


def names(layers: int) -> dict[str, tuple[str, bool]]:
    """Our parameters' names → theirs without `transformer.`, and whether to transpose."""
    found = {ours: (theirs, False) for ours, theirs in _OUTER.items()}
    for i in range(layers):
        for part in ("weight", "bias"):
            for ours, theirs in _NORMS.items():
                found[f"blocks.{i}.{ours}.{part}"] = (f"h.{i}.{theirs}.{part}", False)
            for ours, theirs in _LINEARS.items():
                name = f"blocks.{i}.{ours}.{part}"
                found[name] = (f"h.{i}.{theirs}.{part}", part == "weight")
    return found


class _Index(TypedDict):
    """Weights' names, and the file of the folder that each is in."""

    weight_map: Annotated[dict[str, Name], Field(max_length=100_000)]


def read_transformers(folder: Path) -> tuple[Shape, State]:
    """The sizes, and parameters by our names, fp32 on the CPU."""
    try:
        shape = read_shape(folder / CONFIG)
        theirs = _weights(folder, shape)
    except Missing as error:
        raise UsageError(
            f"{error}: expected a folder of transformers' GPT-2, with {CONFIG} and {MODEL} or "
            f"{PICKLED}"
        ) from None
    state: State = {}
    for ours, (name, transposed) in names(shape.layers).items():
        value = theirs.pop(name).detach().to(torch.float32)
        state[ours] = value.T.contiguous() if transposed else value.contiguous()
    head = theirs.get("lm_head.weight")
    if head is not None and not torch.equal(head.to(torch.float32), state["tokens.weight"]):
        raise UsageError(f"{folder}: lm_head.weight is not wte.weight: expected a tied head")
    # Zero rows, as `Shape.rows` has them; the model never predicts them.
    table = state["tokens.weight"]
    state["tokens.weight"] = F.pad(table, (0, 0, 0, shape.rows - len(table)))
    return shape, state


def _weights(folder: Path, shape: Shape) -> State:
    """The folder's weights by their names without `transformer.`, of which all are of the shape.

    Raises:
        Missing, Unreadable: a file is missing, damaged, or does not hold just those.
    """
    parts = list(_parts(folder))
    if not parts:
        found = _pickled(folder / PICKLED)
        kinds = {name: _kind(value) for name, value in found.items()}
        _check(kinds, shape, folder / PICKLED)
    else:
        headers = {part: tensors.header(part) for part in parts}
        kinds = {name: kind for header in headers.values() for name, kind in header.items()}
        _check(kinds, shape, parts[0])
        found = {name: value for part in parts for name, value in tensors.load(part).items()}
    return {_short(name): value for name, value in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("transformer.")


def load(model: GPT2, folder: Path) -> None:
    """Initialise a model of any recipe; a shorter context takes the first positions."""
    given, state = read_transformers(folder)
    shape = model.shape
    sizes = ("layers", "heads", "width", "vocabulary", "context")
    differs = any(getattr(shape, name) != getattr(given, name) for name in sizes[:-1])
    if differs or shape.context > given.context:
        has, wanted = (
            ", ".join(f"{name}={getattr(one, name)}" for name in sizes) for one in (given, shape)
        )
        raise UsageError(f"{folder}: has {has}; the model expects {wanted}")
    state["positions.weight"] = state["positions.weight"][: shape.context]
    tensors.load_model(model, state, folder)


def save_transformers(folder: Path, shape: Shape, state: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors, which `from_pretrained` of GPT2LMHeadModel reads.

    Args:
        state: parameters by our names, of any dtype and device.

    Raises:
        UsageError: the folder cannot be written.
    """
    theirs = {}
    for ours, (name, transposed) in names(shape.layers).items():
        value = state[ours].detach().to("cpu", torch.float32)
        if ours == "tokens.weight":
            value = value[: shape.vocabulary]
        theirs[f"transformer.{name}"] = (value.T if transposed else value).contiguous()
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in SAME.items()},
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.width,
        "n_positions": shape.context,
        "vocab_size": shape.vocabulary,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), shape.dropout),
        "torch_dtype": "float32",
    }
    end = GPT2_VOCABULARY - 1 if shape.vocabulary == GPT2_VOCABULARY else None
    config |= {"bos_token_id": end, "eos_token_id": end}
    with files.new_files(folder) as part:
        tensors.save(theirs, part / MODEL, {"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _check(found: Mapping[str, Kind], shape: Shape, file: Path) -> None:
    """See that weights are those of a shape, before a byte of them is read."""
    sizes = {**shape.parameters(), "tokens.weight": (shape.vocabulary, shape.width)}
    wanted = {
        theirs: sizes[ours][::-1] if transposed else sizes[ours]
        for ours, (theirs, transposed) in names(shape.layers).items()
    }
    there = {_short(name): kind for name, kind in found.items()}
    for name, size in wanted.items():
        if name not in there:
            raise Unreadable(file, f"no weight {name}: expected {len(wanted)} as GPT-2 has")
        if there[name].shape != size or there[name].dtype not in ("F64", "F32", "F16", "BF16"):
            expected = Kind("floats", size)
            raise Unreadable(file, f"{name} is {there[name]}: expected {expected} as {CONFIG} says")
    # Causal masks, in files of older versions, and the head, which is the embedding table.
    for name in there.keys() - wanted.keys():
        if not name.endswith((".attn.bias", ".attn.masked_bias")) and name != "lm_head.weight":
            reason = f"weight {ascii(name)[:100]} has no place in GPT-2 with a tied head"
            raise Unreadable(file, f"{reason}: expected {len(wanted)} others")


def _parts(folder: Path) -> Iterator[Path]:
    """The folder's safetensors files; none where it has none."""
    if (folder / INDEX).is_file():
        index = schema.load(folder / INDEX, _Index)
        yield from (folder / part for part in sorted(set(index["weight_map"].values())))
    elif (folder / MODEL).is_file():
        yield folder / MODEL


def _pickled(file: Path) -> State:
    """A state dict that torch saved; nothing in it is run.

    Raises:
        Missing: there is no such file.
        Unreadable: it is no state dict, or its tensors are packed and may be of any size.
    """
    with files.opened(file) as opened:
        if zipfile.is_zipfile(opened):
            _check_zip(opened, file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damage makes the unpickler raise
        reason = " ".join(str(error).split()) or type(error).__name__
        text = "".join(char if char.isprintable() else "?" for char in reason)[:200]
        raise Unreadable(file, f"cannot read the weights: {text}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise Unreadable(file, "cannot read the weights: expected names and tensors")
    return found


def _check_zip(opened: Any, file: Path) -> None:
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


_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _kind(value: torch.Tensor) -> Kind:
    """Return a tensor's kind as a safetensors file has it.

    What such a file could not hold has a dtype that none has.
    """
    plain = value.layout is torch.strided and value.device.type == "cpu"
    dtype = _NAMES.get(value.dtype, str(value.dtype)) if plain else f"{value.layout}"
    return Kind(dtype, tuple(value.shape))
