"""The block-diagonal Hadamard transform, and the step sizes of what it leaves.

"Training Transformers with 4-bit Integers" (arXiv 2306.11987), section 3.2: multiplied by a
Hadamard matrix an outlier is spread over its group of columns, and 4 bits lose less. Transformed
values are bit-exact: every kernel adds and subtracts in this order.
"""

from __future__ import annotations

import math

import numpy as np
import torch

GROUPS = tuple(1 << i for i in range(11))  # 1 to 1024


def floats(x: torch.Tensor) -> torch.Tensor:
    """Convert to fp32, but leave float64."""
    return x if x.dtype == torch.float64 else x.float()


def factor(group: int) -> float:
    """Return 1/√group, rounded to fp32."""
    return float(np.float32(group**-0.5))


def butterflies(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return √group times the transform: sums and differences, in stages h = 1, 2, 4, …, group/2.

    In each stage the halves (a, b) of 2h columns become (a + b, a − b): Sylvester's order.

    Args:
        x: m×n, group divides n.

    Returns:
        m×n, fp32, or float64 where x is.
    """
    t = floats(x)
    h = 1
    while h < group:
        a, b = t.unflatten(-1, (-1, 2, h)).unbind(-2)
        t = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        h *= 2
    return t


def transform(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return X·blockdiag(H/√group), fp32, or float64 where x is; its own inverse and transpose."""
    scale = group**-0.5 if x.dtype == torch.float64 else factor(group)
    return butterflies(x, group) * scale


def matrix(group: int) -> torch.Tensor:
    """Return H/√group in float64, group×group: symmetric and orthogonal.

    It follows Sylvester's construction, H_2g = [[H_g, H_g], [H_g, −H_g]].
    """
    h = torch.ones((1, 1), dtype=torch.float64, device="cpu")
    while len(h) < group:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * group**-0.5


def initial_step(t: torch.Tensor) -> torch.Tensor:
    """Return 2·mean|t|/√7, fp32 (1,): LSQ's first step size (arXiv 1902.08153, section 2.1).

    Args:
        t: transformed values, of which the largest code is to be 7.
    """
    return (floats(t).abs().mean() * (2 / math.sqrt(7))).float().reshape(1)


def search_group(x: torch.Tensor) -> int:
    """Return the group of 1 to 1024 that divides x's columns and whose codes are nearest to X.

    Its ‖T − step·q‖² is the least at the initial step, T and q those of the group. Of equal
    ones, as for zeros, the smallest is taken.
    """

    def error(group: int) -> float:
        t = transform(x, group)
        step = initial_step(t).clamp(min=torch.finfo(torch.float32).tiny)
        q = (t / step).round().clamp(-8, 7)
        return float((t - step * q).double().square().sum())

    return min((group for group in GROUPS if x.shape[-1] % group == 0), key=error)
