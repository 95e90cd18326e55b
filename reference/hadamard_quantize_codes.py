"""The Hadamard quantiser of INT8 codes: transforms of integers are exact, whoever adds them.

Section 3 of arXiv 2306.11987, as `jetfire.reference.hadamard_quantize` has it of floats. Codes and
unit are bit-exact: every kernel must reproduce them.
"""

from __future__ import annotations

import math

import torch

from jetfire.reference.hadamard import butterflies
from jetfire.reference.hadamard_quantize import multiplier, rounded
from jetfire.reference.quantize import spread


def quantize_codes(
    q: torch.Tensor, scale: torch.Tensor, step: torch.Tensor, block: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise q·scale transformed: ``clamp(rint(t·(scale·((1/√group)/step))), −8, 7)``.

    t are the butterflies of the codes, integers. Every other operation rounds once, in fp32.

    Args:
        q, scale: codes of m×n in blocks of `block`; group divides n and is at most a block.
        step: fp32 (1,).

    Returns:
        codes, int8 m×n, one per byte; the unit, fp32 (1,): the step; squares, int32 m: Σ codes² per
        row. The unit is NaN where a scale is not finite, and where the multiplier is 0.
    """
    inverse = multiplier(step, group)
    ratios = spread(scale * inverse, block, *q.shape)
    codes = rounded(butterflies(q.float(), group) * ratios).to(torch.int8)
    bad = ~torch.isfinite(scale).all() | (inverse == 0)
    squares = codes.int().square().sum(dim=1, dtype=torch.int32)
    return codes, step.masked_fill(bad, math.nan), squares
