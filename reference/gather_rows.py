"""Rows of packed 4-bit codes, chosen, unpacked to one byte per code, repeated, transposed."""

from __future__ import annotations

import torch

from jetfire.reference.nibbles import unpack, widen


def gather_rows(
    q: torch.Tensor,
    rows: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    repeat: torch.Tensor | None = None,
    transpose: bool = False,
    wide: bool = False,
) -> torch.Tensor:
    """Return the rows that are wanted, int8: w×n, or n×w transposed.

    Args:
        q: int8 m×n/2, two codes per byte.
        rows: int32 (R,), each taken modulo m; -1 gives a row of zeros. None: all m in order.
        counts: int32 (2,); with rows, w = counts[1] of them are wanted.
        repeat: int8 (R,), what a row's codes are multiplied by.
        wide: codes come in the high halves of their bytes.
    """
    if rows is not None:
        if counts is None:
            raise ValueError("rows come with counts")
        wanted = rows[: int(counts[1])].long()
        q = q[wanted % q.shape[0]] * (wanted >= 0)[:, None]
    codes = widen(unpack(q)) if wide else unpack(q)
    if repeat is not None:
        codes = codes * repeat[: len(codes), None]
    return codes.t().contiguous() if transpose else codes
