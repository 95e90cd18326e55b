"""Per-block INT8 quantisation (Jetfire, arXiv 2403.12422, section 4.1), nearest and stochastic.

Codes and scales are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.philox import STREAM_ROUNDING, random_u16

# Below this a block counts as zero: 127/amax would come near fp32's largest finite number.
TINY = 2.0**-100


def pad(x: torch.Tensor, block: int) -> torch.Tensor:
    """Add zeros at the right and bottom up to whole blocks."""
    m, n = x.shape
    return torch.nn.functional.pad(x, (0, -n % block, 0, -m % block))


def block_amax(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return max|x| of every block: m×n fp32 → ⌈m/block⌉×⌈n/block⌉; NaN where a block holds NaN."""
    padded = pad(x, block)
    m, n = padded.shape
    return padded.abs().reshape(m // block, block, n // block, block).amax(dim=(1, 3))


def spread(blocks: torch.Tensor, block: int, m: int, n: int) -> torch.Tensor:
    """Repeat each block's value at each of its elements: ⌈m/block⌉×⌈n/block⌉ → m×n."""
    return blocks.repeat_interleave(block, 0)[:m].repeat_interleave(block, 1)[:, :n]


def scales(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and multiplier of every block: amax/127 and 127/amax, both rounded in fp32.

    A block of amax below 2^-100 has both 0; one that holds NaN or ±Inf has scale NaN and
    multiplier 0.
    """
    amax = block_amax(x, block)
    # A tensor, not the number 127: torch turns division by a number into a product.
    most = torch.full_like(amax, 127.0)
    zero, bad = amax < TINY, ~torch.isfinite(amax)
    scale = (amax / most).masked_fill(zero, 0.0).masked_fill(bad, math.nan)
    multiplier = (most / amax).masked_fill(zero | bad, 0.0)
    return scale, multiplier


def quantize(
    x: torch.Tensor,
    block: int,
    rounding: str = "nearest",
    seed: torch.Tensor | None = None,
    stream: int = STREAM_ROUNDING,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a tensor.

    ``q = rint(x·(127/amax))``, ties to even; stochastic: ``q = floor(x·(127/amax) + u)`` with u of
    16 bits in [0, 1). Every operation rounds once, in fp32. Codes stay in [-127, 127].

    Args:
        x: m×n, any float dtype (converted to fp32 first).
        block: 32, 64 or 128.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: int64 tensor of one element, for stochastic rounding.
        stream: which of the seed's streams of random bits, one of `philox`'s constants.

    Returns:
        q, int8 m×n, and scale, fp32 ⌈m/block⌉×⌈n/block⌉.
    """
    x = x.float()
    m, n = x.shape
    scale, multiplier = scales(x, block)
    product = x * spread(multiplier, block, m, n)
    if rounding == "stochastic":
        if seed is None:
            raise ValueError("stochastic rounding needs a seed")
        u = random_u16(seed, m, n, stream).float() * 2.0**-16
        product = (product + u).floor()
    else:
        product = product.round()
    # Only a NaN or Inf element can make the product of a block with multiplier 0 other than 0.
    q = product.nan_to_num(0.0, 0.0, 0.0).clamp(-127, 127).to(torch.int8)
    return q, scale
