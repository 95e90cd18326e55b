"""Dropout of a quantised tensor (Srivastava et al., "Dropout", JMLR 15, 2014), exact in INT8."""

from __future__ import annotations

import torch

from jetfire.reference.philox import STREAM_DROPOUT, random_u16


def drop_threshold(p: float) -> int:
    """Return p in units of 2^-16: a draw of 16 bits below it drops its element.

    It is at most 65535, so that what is kept can be scaled up.
    """
    return min(max(round(p * 65536), 0), 65535)


def dropout(
    q: torch.Tensor, scale: torch.Tensor, p: float, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero codes with probability p, and divide scales by the probability to keep one.

    No code changes otherwise, so nothing is requantised. The same call on a gradient is the
    backward pass.

    Args:
        q: int8, m×n.
        scale: fp32, ⌈m/block⌉×⌈n/block⌉.
        p: in [0, 1); taken to the nearest 2^-16, in the mask and in the scale alike.
        seed: int64, one element.

    Returns:
        q and scale, of the same shapes; each scale rounded once, in fp32.
    """
    threshold = drop_threshold(p)
    m, n = q.shape
    keep = random_u16(seed, m, n, STREAM_DROPOUT) >= threshold
    # A tensor, not a number: torch turns division by a number into a product.
    kept = torch.full_like(scale, 1 - threshold / 65536)
    return q * keep, scale / kept
