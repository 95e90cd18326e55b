"""The per-block INT8 GEMM (Jetfire, arXiv 2403.12422, section 4.2).

``C[i, j] = Σ_b sA[i/B, b]·sB[j/B, b]·Σ_{k in b} A[i, k]·B[j, k]``, inner sums exact in int32.
"""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import spread


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a·b + c rounded once to fp32, for fp32 operands.

    In float64 the product is exact and the sum is rounded to odd, so that rounding it again to
    fp32 is right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & ((bits & 1) == 0) & torch.isfinite(total)
    # Toward the error's side where the error and the total agree in sign, else toward zero.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return (bits + step * inexact_even).view(torch.float64).float()


def gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """The product as the plain schedule rounds it: one fp32 FMA for each block of K, in order.

    Args:
        a: int8 m×k; a_scale: fp32 ⌈m/block⌉×⌈k/block⌉.
        b: int8 n×k; b_scale: fp32 ⌈n/block⌉×⌈k/block⌉.

    Returns:
        fp32 m×n.
    """
    m, k = a.shape
    n = b.shape[0]
    c = torch.zeros((m, n), device=a.device)
    for i in range(a_scale.shape[1]):
        part = slice(i * block, min(k, (i + 1) * block))
        inner = (a[:, part].double() @ b[:, part].double().t()).float()
        scale = a_scale[:, i, None] * b_scale[None, :, i]
        c = fma(spread(scale, block, m, n), inner, c)
    return c


def gemm_float64(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """The same product in float64, each operand dequantised exactly; m×n float64.

    In slabs of rows, so that beside B and the result at most 2^26 numbers are held.
    """
    m, k = a.shape
    c = torch.empty((m, b.shape[0]), dtype=torch.float64, device=a.device)
    wide_b = dequantize(b, b_scale, block, torch.float64).t()
    rows = block * max(1, (1 << 26) // (k * block))
    for top in range(0, m, rows):
        slab = slice(top, min(m, top + rows))
        scale = a_scale[top // block : -(-slab.stop // block)]
        torch.mm(dequantize(a[slab], scale, block, torch.float64), wide_b, out=c[slab])
    return c
