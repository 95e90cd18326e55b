"""INT8 codes of the transpose from the 4-bit codes that `reference.hadamard_pack` makes."""

from __future__ import annotations

import torch

from jetfire.reference.hadamard import butterflies
from jetfire.reference.hadamard_pack import GROUP, MOST, alternated
from jetfire.reference.nibbles import unpack
from jetfire.reference.philox import STREAM_UNPACKING
from jetfire.reference.quantize import quantize, spread


def hadamard_unpack(
    packed: torch.Tensor,
    steps: torch.Tensor,
    scale: torch.Tensor,
    seed: torch.Tensor,
    n: int,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of xᵀ, rounded stochastically: their mean is what was packed.

    A code times its group's step is transformed back, to integers below 2^15, and multiplied by its
    block's scale/7: both round once, in fp32. What that gives is quantised in the same blocks.

    Args:
        packed: int8 m×16·⌈n/32⌉; steps: int8 m×⌈n/32⌉.
        scale: fp32 ⌈m/block⌉×⌈n/block⌉, of the INT8 codes that were packed.
        seed: int64, one element.

    Returns:
        int8 n×m and fp32 ⌈n/block⌉×⌈m/block⌉.
    """
    m = len(packed)
    codes = unpack(packed).float() * steps.float().repeat_interleave(GROUP, 1)
    integers = alternated(butterflies(codes, GROUP))[:, :n]
    unit = scale / torch.full_like(scale, MOST)
    q, scale = quantize(
        integers * spread(unit, block, m, n), block, "stochastic", seed, STREAM_UNPACKING
    )
    return q.t().contiguous(), scale.t().contiguous()
