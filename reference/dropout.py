"""Dropout of a quantised tensor (Srivastava et al., "Dropout", JMLR 15, 2014), exact in INT8."""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize
from jetfire.reference.philox import STREAM_DROPOUT, random_u16
from jetfire.reference.quantize import quantize


def drop_threshold(p: float) -> int:
    """Return p in units of 2^-16: a draw of 16 bits below it drops its element.

    It is at most 65535, so that what is kept can be scaled up.
    """
    return min(max(round(p * 65536), 0), 65535)


def dropout(
    q: torch.Tensor,
    scale: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    block: int = 32,
    out_block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero codes with probability p, and divide scales by the probability to keep one.

    No code changes otherwise, so nothing is requantised but for another `out_block`. The same call
    on a gradient is the backward pass.

    Args:
        q: int8, m×n.
        scale: fp32, ⌈m/block⌉×⌈n/block⌉.
        p: in [0, 1); taken to the nearest 2^-16, in the mask and in the scale alike.
        seed: int64, one element.
        block: that of q.
        out_block: the result's. Where it is another, codes times their divided scales, rounded in
            fp32, are quantised to nearest.

    Returns:
        Codes, m×n, and scales; those of one block are rounded once, in fp32.
    """
    threshold = drop_threshold(p)
    m, n = q.shape
    keep = random_u16(seed, m, n, STREAM_DROPOUT) >= threshold
    # A tensor, not a number: torch turns division by a number into a product.
    kept = torch.full_like(scale, 1 - threshold / 65536)
    codes, scales = q * keep, scale / kept
    if out_block in (None, block):
        return codes, scales
    return quantize(dequantize(codes, scales, block), out_block)
