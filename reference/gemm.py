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


# The telescoped schedule's constants: the float whose bits the integer sums start at, the K after
# which they start again, the K of a correction's terms, and the K between two corrections.
BASE = 12582912.0
WINDOW, SLOT, GROUP = 256, 128, 1024


def telescoped_factors(
    a_scale: torch.Tensor, b_scale: torch.Tensor, block: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The telescoped schedule's factors and corrections, as fp32 rounds them.

    Block b's factor is s_b − s_{b+1}, s_b being the product of its scales and s_{b+1} zero where
    b ends a window of 256 of K, or K itself. A correction takes off what the base has added
    in 1024 of K.

    Returns:
        A factor for each block of K, and a correction for each 1024 of K; each fp32
        ⌈m/block⌉×⌈n/block⌉.
    """
    count = a_scale.shape[1]
    ends = {*range(WINDOW // block - 1, count, WINDOW // block), count - 1}
    products = [a_scale[:, b, None] * b_scale[None, :, b] for b in range(count)]
    zero = torch.zeros_like(products[0])
    factors = [p - (zero if b in ends else products[b + 1]) for b, p in enumerate(products)]
    corrections = []
    for group in range(0, count, GROUP // block):
        correction = zero
        for slot in range(group, min(group + GROUP // block, count), SLOT // block):
            added = zero.double()
            for factor in factors[slot : slot + SLOT // block]:
                added = added + factor.double()
            correction = correction + (-BASE * added).float()
        corrections.append(correction)
    return factors, corrections


def gemm_telescoped(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """The product as the telescoped schedule rounds it: `gemm`'s arguments and result.

    The integer sums run on over a window, from the bits of 12582912.0, where they stay in that
    float's binade: read as a float they are 12582912 + S_b. By summation by parts
    Σ s_b·(S_b − S_{b−1}) = Σ (s_b − s_{b+1})·S_b, one fp32 FMA a block.
    """
    m, k = a.shape
    n = b.shape[0]
    c = torch.zeros((m, n), device=a.device)
    factors, corrections = telescoped_factors(a_scale, b_scale, block)
    for i, factor in enumerate(factors):
        part = slice(i * block, min(k, (i + 1) * block))
        if i * block % WINDOW == 0:
            sums = torch.full((m, n), BASE, dtype=torch.float64, device=a.device)
        sums += a[:, part].double() @ b[:, part].double().t()
        c = fma(spread(factor, block, m, n), sums.float(), c)
        if (i + 1) * block % GROUP == 0 or i == len(factors) - 1:
            c = c + spread(corrections[i * block // GROUP], block, m, n)
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
