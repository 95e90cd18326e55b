"""Quantisation with fallback (Zhang et al., arXiv 2503.08040): outlier blocks get codes twice.

Codes and scales are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import torch

from jetfire.reference.quantize import block_amax, quantize, spread

# From here on 127 times a scale may overflow: such a block does not fall back.
LARGEST = 2.0**127


def fallback_quantize(
    x: torch.Tensor, block: int, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes and scales of a tensor, and of what they miss where a block falls back.

    A block falls back if its largest magnitude is above the threshold and below 2^127. What its
    codes miss, ``x - q·scale``, each operation rounded once in fp32, is then quantised as a block
    of its own. All rounding is to nearest.

    Args:
        x: m×n, any float dtype (converted to fp32 first).
        block: 32, 64 or 128.
        threshold: fp32, one element.

    Returns:
        q, int8 m×n, and scale, fp32 ⌈m/block⌉×⌈n/block⌉, as `quantize` has them; r and r_scale, of
        the same dtypes and shapes, 0 in blocks that do not fall back.
    """
    x = x.float()
    q, scale = quantize(x, block)
    amax = block_amax(x, block)
    falls = (amax > threshold) & (amax < LARGEST)
    missed = x - q.float() * spread(scale, block, *x.shape)
    return q, scale, *quantize(missed.masked_fill(~spread(falls, block, *x.shape), 0.0), block)


def threshold_of(x: torch.Tensor, block: int, percent: int) -> torch.Tensor:
    """Return the threshold above which so many of a matrix's blocks are, rounded up: fp32, one."""
    largest = block_amax(x.float(), block).flatten().nan_to_num(0.0, 0.0).sort(descending=True)[0]
    falling = -(-len(largest) * percent // 100)
    return largest[falling : falling + 1].clone() if falling < len(largest) else largest[:1] * 0
