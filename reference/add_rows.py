"""Rows of a gradient added to the rows of a table that their ids name."""

from __future__ import annotations

import torch


def add_rows(table: torch.Tensor, ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the table with row i of the gradient added to its row ids[i], in float64.

    Args:
        table: m×n.
        ids: int64, k, each of 0 to m − 1, any of them more than once.
        gradient: k×n.
    """
    return table.double().index_add(0, ids, gradient.double())
