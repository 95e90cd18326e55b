"""Modules over the ops: what a model uses instead of torch.nn to train in INT8 or INT4.

Importing this imports no torch: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetfire.nn.activation import Int8GELU
    from jetfire.nn.agreement import check_agreement
    from jetfire.nn.block import Int8Block
    from jetfire.nn.captured import CapturedStep
    from jetfire.nn.conversion import Report, convert
    from jetfire.nn.embedding import TiedGradient, tied_embedding
    from jetfire.nn.flow import Stream
    from jetfire.nn.frozen import FrozenInt8Linear
    from jetfire.nn.int4 import Int4Conv1D, Int4Linear, is_int4_state
    from jetfire.nn.int4_block import Int4Block
    from jetfire.nn.linear import Int8Conv1D, Int8Linear, quantised_weights
    from jetfire.nn.llama import Int8LlamaBlock
    from jetfire.nn.loss import linear_cross_entropy
    from jetfire.nn.made import weights_changed
    from jetfire.nn.norm import Int8LayerNorm
    from jetfire.nn.optimizer import AdamW, replaying
    from jetfire.nn.recipes import RECIPES, Int4, Recipe
    from jetfire.nn.sharding import gather_codes
    from jetfire.nn.squares import gradient_norm
    from jetfire.nn.watching import CodesQuality, Watched, watch

_MODULES = {
    "AdamW": "optimizer",
    "CapturedStep": "captured",
    "CodesQuality": "watching",
    "FrozenInt8Linear": "frozen",
    "Int4": "recipes",
    "Int4Block": "int4_block",
    "Int4Conv1D": "int4",
    "Int4Linear": "int4",
    "Int8Block": "block",
    "Int8Conv1D": "linear",
    "Int8GELU": "activation",
    "Int8LayerNorm": "norm",
    "Int8LlamaBlock": "llama",
    "Int8Linear": "linear",
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "Report": "conversion",
    "Stream": "flow",
    "TiedGradient": "embedding",
    "Watched": "watching",
    "check_agreement": "agreement",
    "convert": "conversion",
    "gather_codes": "sharding",
    "gradient_norm": "squares",
    "is_int4_state": "int4",
    "linear_cross_entropy": "loss",
    "quantised_weights": "linear",
    "replaying": "optimizer",
    "tied_embedding": "embedding",
    "watch": "watching",
    "weights_changed": "made",
}
__all__ = [
    "RECIPES",
    "AdamW",
    "CapturedStep",
    "CodesQuality",
    "FrozenInt8Linear",
    "Int4",
    "Int4Block",
    "Int4Conv1D",
    "Int4Linear",
    "Int8Block",
    "Int8Conv1D",
    "Int8GELU",
    "Int8LayerNorm",
    "Int8Linear",
    "Int8LlamaBlock",
    "Recipe",
    "Report",
    "Stream",
    "TiedGradient",
    "Watched",
    "check_agreement",
    "convert",
    "gather_codes",
    "gradient_norm",
    "is_int4_state",
    "linear_cross_entropy",
    "quantised_weights",
    "replaying",
    "tied_embedding",
    "watch",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jetfire.nn.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
