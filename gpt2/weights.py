"""GPT-2's weights from and to a folder as `transformers` keeps them.

Theirs: `transformer.h.N.attn.c_attn.weight` and so on, each linear layer a Conv1D (in×out). Ours:
`blocks.N.qkv.weight`, out×in, and the embedding table padded to a multiple of 64 rows.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from jetfire.core.files import write
from jetfire.gpt2 import checkpoint
from jetfire.gpt2.tokenizers import GPT2_VOCABULARY
from jetfire.ops.errors import UsageError

if TYPE_CHECKING:
    from jetfire.gpt2.model import GPT2

State = dict[str, torch.Tensor]

_OUTER = {"tokens.weight": "wte.weight", "positions.weight": "wpe.weight",
          "norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}  # fmt: skip
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_LINEARS = {"qkv": "attn.c_attn", "projection": "attn.c_proj", "expand": "mlp.c_fc",
            "contract": "mlp.c_proj"}  # fmt: skip
# Settings of transformers' GPT2Config under which its GPT-2 is ours; absent is the first.
_SAME: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
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


def read_transformers(folder: Path) -> tuple[dict[str, Any], State]:
    """Fields of `Shape`, and parameters by our names, fp32 on the CPU.

    Raises:
        UsageError: the folder has no GPT-2 of transformers, or one that ours cannot be.
    """
    config = _config(folder)
    fields = _fields(config, folder)
    theirs = {name.removeprefix("transformer."): value for name, value in _tensors(folder).items()}
    state: State = {}
    expected = names(fields["layers"])
    for ours, (name, transposed) in expected.items():
        if name not in theirs:
            raise UsageError(f"{folder}: no weight {name}: expected {len(expected)} as GPT-2 has")
        value = theirs.pop(name).to(torch.float32)
        state[ours] = value.T.contiguous() if transposed else value.contiguous()
    # Causal masks, in files of older versions, and the head, which is the embedding table.
    unknown = [n for n in theirs if not n.endswith((".attn.bias", ".attn.masked_bias"))]
    if "lm_head.weight" in unknown and torch.equal(
        theirs["lm_head.weight"].to(torch.float32), state["tokens.weight"]
    ):
        unknown.remove("lm_head.weight")
    if unknown:
        raise UsageError(
            f"{folder}: weight {unknown[0]} has no place in GPT-2 with a tied head: expected "
            f"{len(expected)} others"
        )
    _check(state, fields, folder)
    state["tokens.weight"] = _pad(state["tokens.weight"])
    return fields, state


def load(model: GPT2, folder: Path) -> None:
    """Initialise a model of any recipe; a shorter context takes the first positions.

    Raises:
        UsageError: see `read_transformers`, or the model is of another shape.
    """
    fields, state = read_transformers(folder)
    shape = model.shape
    wanted = {name: getattr(shape, name) for name in ("layers", "heads", "width", "vocabulary")}
    given = {name: fields[name] for name in wanted}
    if wanted != given or shape.context > fields["context"]:
        both = (
            ", ".join(f"{name}={value}" for name, value in (*sizes.items(), ("context", context)))
            for sizes, context in ((given, fields["context"]), (wanted, shape.context))
        )
        raise UsageError(f"{folder}: has {next(both)}; the model expects {next(both)}")
    state["positions.weight"] = state["positions.weight"][: shape.context]
    checkpoint.load_model(model, state, folder)


def save_transformers(folder: Path, fields: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors, which `from_pretrained` of GPT2LMHeadModel reads.

    Args:
        fields: `dataclasses.asdict(model.shape)`.
        state: parameters by our names, of any dtype and device.

    Raises:
        UsageError: the folder cannot be written.
    """
    from safetensors.torch import save

    theirs = {}
    for ours, (name, transposed) in names(fields["layers"]).items():
        value = state[ours].detach().to("cpu", torch.float32)
        if ours == "tokens.weight":
            value = value[: fields["vocabulary"]]
        theirs[f"transformer.{name}"] = (value.T if transposed else value).contiguous()
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: values[0] for name, values in _SAME.items()},
        "n_layer": fields["layers"],
        "n_head": fields["heads"],
        "n_embd": fields["width"],
        "n_positions": fields["context"],
        "vocab_size": fields["vocabulary"],
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), fields.get("dropout", 0.0)),
        "torch_dtype": "float32",
    }
    if fields["vocabulary"] == GPT2_VOCABULARY:
        config |= {"bos_token_id": GPT2_VOCABULARY - 1, "eos_token_id": GPT2_VOCABULARY - 1}
    else:
        config |= {"bos_token_id": None, "eos_token_id": None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The weights last: a folder that has them is whole.
        write(folder / "config.json", json.dumps(config, indent=2) + "\n")
        write(folder / "model.safetensors", save(theirs, metadata={"format": "pt"}))
    except OSError as error:
        raise UsageError(f"{folder}: cannot write: {error.strerror}") from None
    return folder


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{folder}: config.json: {error.strerror}: expected a folder of transformers' GPT-2, "
            "with config.json and model.safetensors or pytorch_model.bin"
        ) from None
    except ValueError as error:
        raise UsageError(f"{folder}: config.json is damaged: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{folder}: config.json is damaged: expected an object")
    for name, accepted in _SAME.items():
        value = found.get(name, accepted[0])
        if value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise UsageError(f"{folder}: config.json has {name} {value!r}: expected {wanted}")
    return found


def _fields(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    try:
        fields = {ours: int(config[theirs]) for ours, theirs in (
            ("layers", "n_layer"), ("heads", "n_head"), ("width", "n_embd"),
            ("context", "n_positions"), ("vocabulary", "vocab_size"),
        )}  # fmt: skip
        inner = config.get("n_inner") or 4 * fields["width"]
        dropout = float(config.get("resid_pdrop", 0.1))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}: config.json is not of a GPT-2: {error!r}") from None
    if inner != 4 * fields["width"]:
        raise UsageError(
            f"{folder}: config.json has n_inner {inner}: expected {4 * fields['width']}, four "
            "times n_embd"
        )
    return fields | {"dropout": dropout}


def _check(state: Mapping[str, torch.Tensor], fields: Mapping[str, Any], folder: Path) -> None:
    """That every parameter has the size that config.json says."""
    width = fields["width"]
    sizes = {
        "qkv": (3 * width, width), "projection": (width, width),
        "expand": (4 * width, width), "contract": (width, 4 * width),
        "tokens": (fields["vocabulary"], width), "positions": (fields["context"], width),
    }  # fmt: skip
    for name, value in state.items():
        *_, layer, part = name.split(".")
        size = sizes.get(layer, (width,))
        if part == "bias":
            size = size[:1]
        if tuple(value.shape) != size:
            raise UsageError(
                f"{folder}: {name} is {'×'.join(map(str, value.shape))}, expected "
                f"{'×'.join(map(str, size))} as config.json has it"
            )


def _pad(table: torch.Tensor) -> torch.Tensor:
    """Zero rows up to a multiple of 64, as `Shape.rows` has; the model never predicts them."""
    return F.pad(table, (0, 0, 0, -len(table) % 64))


def _tensors(folder: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return {k: v for part in parts for k, v in load_file(folder / part).items()}
        if (folder / "model.safetensors").is_file():
            return load_file(folder / "model.safetensors")
        if (folder / "pytorch_model.bin").is_file():
            found = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
            if not isinstance(found, dict):
                raise ValueError("expected a state dict in pytorch_model.bin")
            return found
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError,
        SafetensorError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise UsageError(f"{folder}: cannot read the weights: {reason[:200]}") from None
    raise UsageError(f"{folder}: no weights: expected model.safetensors or pytorch_model.bin")
