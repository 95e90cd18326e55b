"""The INT4 GEMM of a linear layer and of its sampled gradients (arXiv 2306.11987, section 4)."""

from __future__ import annotations

import torch

from jetfire.reference.bit_split import HIGH


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A (m×k)·Bᵀ (n×k) of int8 codes, exact in float64 (sums below 2^53); float64 m×n."""
    return a.double() @ b.double().t()


def scaled(
    sums: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float(sums)·(a_scale·b_scale), times a row's weight, plus a column's bias.

    Each step is rounded to fp32 by itself.

    Args:
        sums: integers in float64 or int32, m×n; a_scale, b_scale: fp32, of one element.
        weight: fp32, m; bias: fp32, n.

    Returns:
        fp32 m×n.
    """
    c = sums.float() * (a_scale * b_scale)
    if weight is not None:
        c = c * weight[:, None]
    return c if bias is None else c + bias


def forward(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return s·A·Bᵀ + bias of codes a (m×k) and b (n×k), fp32 m×n."""
    return scaled(product(a, b), a_scale, b_scale, bias=bias)


def dgrad(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return weight_i·s·A_i·Bᵀ of the first counts[1] rows, fp32 counts[1]×n; counts is (2,)."""
    rows = int(counts[1])
    return scaled(product(a[:rows], b), a_scale, b_scale, weight[:rows])


def wgrad(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return s·(14·Σ over the first counts[0] of K + Σ from there to counts[1]), fp32 m×n."""
    high, end = counts.tolist()
    sums = HIGH * product(a[:, :high], b[:, :high]) + product(a[:, high:end], b[:, high:end])
    return scaled(sums, a_scale, b_scale)
