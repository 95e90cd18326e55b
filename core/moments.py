"""AdamW's moments as INT8 codes: the numbers that share a scale."""

from __future__ import annotations

from jetfire.core.tensors import ceil_div

GROUP = 128  # numbers of a row, as in jetfire.reference.adamw8


def scales(m: int, n: int) -> tuple[int, int]:
    """Return the shape of the scales of an m×n moment: one for every `GROUP` numbers of a row."""
    return m, ceil_div(n, GROUP)
