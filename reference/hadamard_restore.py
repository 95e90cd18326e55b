"""What 4-bit codes of a transformed matrix stand for, transformed back, as INT8 codes."""

from __future__ import annotations

import torch

from jetfire.reference.hadamard import butterflies, factor
from jetfire.reference.nibbles import narrow
from jetfire.reference.quantize import quantize


def hadamard_restore(
    wide: torch.Tensor, step: torch.Tensor, group: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT8 codes and scales of the transpose of step·C·blockdiag(H/√group), to nearest.

    Sums of codes are integers, exact in fp32, and are quantised in blocks. A scale is then
    multiplied by step·(1/√group): both products round once, in fp32.

    Args:
        wide: int8 m×n, C as wide codes; group divides n.
        step: fp32 (1,). One that is not finite shows in all scales.

    Returns:
        int8 n×m and fp32 ⌈n/block⌉×⌈m/block⌉.
    """
    q, scale = quantize(butterflies(narrow(wide).float(), group), block)
    unit = step * torch.full_like(step, factor(group))
    return q.t().contiguous(), (scale * unit).t().contiguous()
