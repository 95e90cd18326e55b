"""Modules over the ops: what a model uses instead of torch.nn to train in INT8 or INT4."""

from jetfire.nn.block import Int8Block, Stream
from jetfire.nn.convert import Report, convert
from jetfire.nn.embedding import TiedGradient, tied_embedding
from jetfire.nn.gelu import Int8GELU
from jetfire.nn.int4 import Int4Conv1D, Int4Linear, is_int4_state
from jetfire.nn.layernorm import Int8LayerNorm
from jetfire.nn.linear import Int8Conv1D, Int8Linear, quantised_weights
from jetfire.nn.loss import linear_cross_entropy
from jetfire.nn.optimizer import AdamW, replaying
from jetfire.nn.products import weights_changed
from jetfire.nn.recipes import RECIPES, Int4, Recipe

__all__ = [
    "RECIPES",
    "AdamW",
    "Int4",
    "Int4Conv1D",
    "Int4Linear",
    "Int8Block",
    "Int8Conv1D",
    "Int8GELU",
    "Int8LayerNorm",
    "Int8Linear",
    "Recipe",
    "Report",
    "Stream",
    "TiedGradient",
    "convert",
    "is_int4_state",
    "linear_cross_entropy",
    "quantised_weights",
    "replaying",
    "tied_embedding",
    "weights_changed",
]
