"""Attention whose backward keeps query, key, value and output in INT8, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import NamedTuple

import torch

from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized
from jetfire.nn.products import FLOATS
from jetfire.ops import int8_dequantize, int8_quantize

Tensor = torch.Tensor
# Of query, key and value, matrices of tokens × the width of each.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# Keys that it draws: one for each tensor that a fused attention keeps in codes.
KEYS = 4


class _Codes(NamedTuple):
    """A tensor of batch × heads × length × head, as codes of tokens × width."""

    codes: Quantized
    batch: int
    heads: int
    dtype: torch.dtype


def keeps_codes(attention: Attention, side: Block, keys: Tensor) -> Attention:
    """Return the same attention, whose backward reads what it keeps of these sizes from codes.

    Those are what `scaled_dot_product_attention` keeps of query, key, value and output, rounded
    stochastically: forward is as it was, and gradients have their noise. Where others say what is
    kept, attention is as it was: torch.compile, and hooks on saved tensors, as of checkpointing or
    of offload, which would not see what ours have taken.

    Args:
        side: of the codes' blocks.
        keys: int64, `KEYS` of them, with which nothing else is rounded.
    """

    def kept(*parts: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _others_hooks():
            return attention(*parts)
        with _in_codes(parts, side, keys):
            return attention(*parts)

    return kept


def _others_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _in_codes(parts: Sequence[Tensor], side: Block, keys: Tensor) -> AbstractContextManager[None]:
    shapes, order = {part.shape for part in parts}, count()

    def pack(x: Tensor) -> Tensor | _Codes:
        if x.dim() != 4 or x.dtype not in FLOATS:
            return x
        batch, heads, length, head = x.shape
        if (batch * length, heads * head) not in shapes:
            return x
        matrix = x.detach().transpose(1, 2).reshape(batch * length, heads * head)
        at = next(order) % KEYS  # attention in single operations may keep more
        key = keys[at : at + 1]
        codes = int8_quantize(matrix, block=side, rounding="stochastic", seed=key)
        return _Codes(codes, batch, heads, x.dtype)

    def unpack(x: Tensor | _Codes) -> Tensor:
        if isinstance(x, Tensor):
            return x
        matrix = int8_dequantize(x.codes, out=FLOATS[x.dtype])
        return matrix.view(x.batch, -1, x.heads, matrix.shape[1] // x.heads).transpose(1, 2)

    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    return hooks
