"""An embedding whose table is the output head's weight too: one gradient, not two and their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from jetfire.core.arguments import checked, shown
from jetfire.core.errors import UsageError


class TiedGradient:
    """The head's gradient of a table, on its way to the embedding's backward.

    Autograd would fill a second table with zeros and the embedding's rows, and add the two: 16
    bytes per element, 0.8 of the 43 ms of a step of width 4096 (H200). One forward, one use.
    """

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None

    def put(self, table: torch.Tensor) -> None:
        self._table = table

    def take(self) -> torch.Tensor | None:
        table, self._table = self._table, None
        return table


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: torch.Tensor, ids: torch.Tensor, tied: TiedGradient
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.tied, ctx.rows, ctx.dtype = tied, table.shape[0], table.dtype
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        ids, gradient = ids.flatten(), grads[0].flatten(0, -2)
        table = ctx.tied.take()
        if table is None:
            return _dense(gradient, ids, ctx.rows), None, None
        return add_rows(table, ids, gradient), None, None


def _dense(gradient: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a table of zeros but for the sums of each id's rows, in an order that is always so."""
    return torch.ops.aten.embedding_dense_backward(gradient, ids, rows, -1, False)


def add_rows(table: torch.Tensor, ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Add row i of the gradient to row ids[i] of the table, in place, to the same bits each time.

    Args:
        table: rows × width; ids: int64, tokens; gradient: tokens × width.
    """
    ordered, order = ids.sort(stable=True)
    new = torch.ones_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    rank = new.cumsum(0) - 1
    # The k-th different id has rank k; ranks that none has add their zeros to row 0.
    ranks = torch.empty_like(ids).scatter_(0, order, rank)
    rows = torch.zeros_like(ids).scatter_(0, rank, ordered)
    sums = _dense(gradient.to(table.dtype), ranks, len(ids))
    return table.index_add_(0, rows, sums)


@checked
def tied_embedding(table: torch.Tensor, ids: torch.Tensor, tied: TiedGradient) -> torch.Tensor:
    """Return torch's embedding; backward adds to what the head left in `tied`, if anything.

    Args:
        table: rows × width; ids: int64, any shape.
    """
    if not isinstance(tied, TiedGradient):
        raise UsageError(f"tied{shown(tied)}: expected a TiedGradient")
    return _TiedEmbedding.apply(table, ids, tied)
