"""Modules over the ops: what a model uses instead of torch.nn to train in INT8 or INT4.

Importing this imports no torch: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetfire.nn.activation import Int8GELU as Int8GELU
    from jetfire.nn.agreement import check_agreement as check_agreement
    from jetfire.nn.block import Int8Block as Int8Block
    from jetfire.nn.captured import CapturedStep as CapturedStep
    from jetfire.nn.conversion import Report as Report
    from jetfire.nn.conversion import convert as convert
    from jetfire.nn.embedding import TiedGradient as TiedGradient
    from jetfire.nn.embedding import tied_embedding as tied_embedding
    from jetfire.nn.flow import Stream as Stream
    from jetfire.nn.frozen import FrozenInt8Linear as FrozenInt8Linear
    from jetfire.nn.int4 import Int4Conv1D as Int4Conv1D
    from jetfire.nn.int4 import Int4Linear as Int4Linear
    from jetfire.nn.int4 import is_int4_state as is_int4_state
    from jetfire.nn.int4_block import Int4Block as Int4Block
    from jetfire.nn.linear import Int8Conv1D as Int8Conv1D
    from jetfire.nn.linear import Int8Linear as Int8Linear
    from jetfire.nn.linear import quantised_weights as quantised_weights
    from jetfire.nn.llama import Int8LlamaBlock as Int8LlamaBlock
    from jetfire.nn.loss import linear_cross_entropy as linear_cross_entropy
    from jetfire.nn.made import weights_changed as weights_changed
    from jetfire.nn.norm import Int8LayerNorm as Int8LayerNorm
    from jetfire.nn.optimizer import AdamW as AdamW
    from jetfire.nn.optimizer import replaying as replaying
    from jetfire.nn.recipes import RECIPES as RECIPES
    from jetfire.nn.recipes import Int4 as Int4
    from jetfire.nn.recipes import Recipe as Recipe
    from jetfire.nn.sharding import gather_codes as gather_codes
    from jetfire.nn.squares import gradient_norm as gradient_norm
    from jetfire.nn.watching import CodesQuality as CodesQuality
    from jetfire.nn.watching import Watched as Watched
    from jetfire.nn.watching import watch as watch

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
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jetfire.nn.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
