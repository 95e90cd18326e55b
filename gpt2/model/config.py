"""The sizes of a GPT-2 in the config.json that `transformers` writes; no torch is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from jetfire.core import schema
from jetfire.core.files import Unreadable
from jetfire.core.schema import Scalar
from jetfire.gpt2.data.vocabulary import Vocabulary
from jetfire.gpt2.model.shape import Context, Depth, Dropout, Shape, Width

# Settings of transformers' GPT2Config under which its GPT-2 is ours; absent is the first.
SAME: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


class _Sizes(TypedDict):
    """What of GPT2Config says how large a model is."""

    n_layer: Depth
    n_head: Depth
    n_embd: Width
    n_positions: Context
    vocab_size: Vocabulary


class _Config(_Sizes, total=False):
    """And what of it must be as ours is, or may be."""

    n_inner: int | None
    resid_pdrop: Dropout
    model_type: Scalar
    activation_function: Scalar
    layer_norm_epsilon: Scalar
    scale_attn_weights: Scalar
    scale_attn_by_inverse_layer_idx: Scalar
    add_cross_attention: Scalar
    tie_word_embeddings: Scalar


def read_shape(file: Path) -> Shape:
    """Return the sizes that a config.json tells of.

    Raises:
        Missing, Unreadable: it is missing or damaged, or not of a GPT-2 that ours can be.
    """
    config = schema.load(file, _Config)
    for name, accepted in SAME.items():
        value = config.get(name, accepted[0])
        if value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise Unreadable(file, f"has {name} {repr(value)[:50]}: expected {wanted}")
    width = config["n_embd"]
    if (inner := config.get("n_inner") or 4 * width) != 4 * width:
        raise Unreadable(file, f"has n_inner {inner}: expected {4 * width}, four times n_embd")
    if width % config["n_head"]:
        raise Unreadable(file, f"has n_embd {width}: expected a multiple of n_head")
    return Shape(
        layers=config["n_layer"],
        heads=config["n_head"],
        width=width,
        context=config["n_positions"],
        vocabulary=config["vocab_size"],
        dropout=config.get("resid_pdrop", 0.1),
    )
