"""Per-block INT8 codes of attention's three gradients, side by side as the QKV product's output is.

Quantisation as in Jetfire (arXiv 2403.12422, section 4.1); blocks may lie across two of the three.
"""

from __future__ import annotations

import torch

from jetfire.reference.quantize import quantize


def quantize_qkv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: int,
    rounding: str = "nearest",
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes int8 m×3w and scales fp32 ⌈m/block⌉×⌈3w/block⌉ of three m×w matrices."""
    return quantize(torch.cat((query, key, value), dim=1), block, rounding, seed)
