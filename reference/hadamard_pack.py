"""4-bit codes of the Hadamard transform of INT8 codes, rounded so that their mean is the transform.

It takes 32 neighbours of a row at a time, whose signs a fixed sequence changes first (a randomised
Hadamard transform, QuIP#, arXiv 2402.04396, section 3, but always the same one): without it the
mean of a group, as GELU's outputs have one, is a single large number of the transform, by which all
32 are rounded. A group's step is an integer. Sums of codes are exact, and so are steps: packed
codes are bit-exact, every kernel must reproduce them.
"""

from __future__ import annotations

import torch

from jetfire.reference.hadamard import butterflies
from jetfire.reference.nibbles import pack
from jetfire.reference.philox import STREAM_PACKING, uniform

GROUP = 32
MOST = 7  # codes are in [-7, 7]


def signs() -> torch.Tensor:
    """Return the sequence, fp32: −1 where bits 0 and 1, or else bits 2 and 3, of a place are set.

    Of 32 equal numbers it leaves none larger than 8 in the transform, where 32 would be.
    """
    i = torch.arange(GROUP, device="cpu")
    return 1.0 - 2.0 * (((i & (i >> 1)) ^ ((i >> 2) & (i >> 3))) & 1).float()


def alternated(x: torch.Tensor) -> torch.Tensor:
    """Return x times the signs, fp32, its columns filled up with zeros to whole groups."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP))
    return (wide.unflatten(1, (-1, GROUP)) * signs().to(x.device)).flatten(1)


def hadamard_pack(q: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes and steps: ``floor(t·(7/(32·step)) + u)``, t the transformed integers.

    A group's step is ``⌈max|t|/32⌉``, at most 127. Product and sum round once each, in fp32, and
    codes stay in [-7, 7]; u is 16 bits in [0, 1). So 32·step/7 times a code is t in the mean.

    Args:
        q: int8 m×n, in [-127, 127].
        seed: int64, one element.

    Returns:
        int8 m×16·⌈n/32⌉, two codes per byte (`reference.nibbles`), and int8 m×⌈n/32⌉.
    """
    t = butterflies(alternated(q), GROUP).unflatten(1, (-1, GROUP))
    steps = (t.abs().amax(dim=2, keepdim=True) / GROUP).ceil()
    multiplier = (torch.full_like(steps, MOST) / (GROUP * steps)).masked_fill(steps == 0, 0.0)
    product = (t * multiplier).flatten(1)
    draws = uniform(seed, len(q), product.shape[1], STREAM_PACKING)
    codes = (product + draws).floor().clamp(min=-MOST)
    return pack(codes.to(torch.int8)), steps[:, :, 0].to(torch.int8)
