"""The per-block INT8 GEMM (Jetfire, arXiv 2403.12422, section 4.2).

``C[i, j] = Σ_b sA[i/B, b]·sB[j/B, b]·Σ_{k in b} A[i, k]·B[j, k]``, inner sums exact in int32.
"""

from __future__ import annotations

import torch

from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import pad, spread


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a·b + c rounded once to fp32, for fp32 operands.

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
    """Return the product as the plain schedule rounds it: one fp32 FMA per block of K, in order.

    GPUs round like this. On a CPU, in Triton's interpreter too, kernels round the product and the
    sum apart.

    Args:
        a: int8 m×k; a_scale: fp32 ⌈m/block⌉×⌈k/block⌉.
        b: int8 n×k; b_scale: fp32 ⌈n/block⌉×⌈k/block⌉.

    Returns:
        fp32 m×n.
    """
    m, k = a.shape
    n = b.shape[0]
    c = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    for i in range(a_scale.shape[1]):
        part = slice(i * block, min(k, (i + 1) * block))
        inner = (a[:, part].double() @ b[:, part].double().t()).float()
        scale = a_scale[:, i, None] * b_scale[None, :, i]
        c = fma(spread(scale, block, m, n), inner, c)
    return c


def sums_of_squares(c: torch.Tensor) -> torch.Tensor:
    """Return Σx² of each 16 rows and 32 columns: m×n → float64 ⌈m/16⌉×⌈n/32⌉."""
    m, n = c.shape
    padded = torch.nn.functional.pad(c.double(), (0, -n % 32, 0, -m % 16))
    return padded.square().view(-(-m // 16), 16, -(-n // 32), 32).sum(dim=(1, 3))


def norms(codes: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest 2-norm of a row of each block: int8 m×k → float64 ⌈m/block⌉×⌈k/block⌉."""
    rows = block * max(1, (1 << 26) // max(1, codes.shape[1] * block))
    found = []
    for part in codes.split(rows):
        padded = pad(part, block).float().square()
        m, k = padded.shape
        found.append(padded.view(m // block, block, k // block, block).sum(dim=3).amax(dim=1))
    return torch.cat(found).double().sqrt()


def magnitudes(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bound what each block of C is summed from: float64 ⌈m/block⌉×⌈n/block⌉.

    A block of K adds to no element more than the norms of its rows of A and B, multiplied, which is
    its integers' largest sum (Cauchy-Schwarz), times its scales. Scales that are NaN count as 0.

    Returns:
        The bound's sum over K; that of the integers alone; and the largest product of scales.
    """
    of_a, of_b = norms(a, block), norms(b, block)
    a_scale, b_scale = (scale.double().nan_to_num(0.0) for scale in (a_scale, b_scale))
    largest = a_scale.new_zeros((len(a_scale), len(b_scale)))
    for i in range(a_scale.shape[1]):
        largest = torch.maximum(largest, a_scale[:, i, None] * b_scale[None, :, i])
    return (of_a * a_scale) @ (of_b * b_scale).t(), of_a @ of_b.t(), largest


# The telescoped schedule's constants: where the integer sums start, the K after which they start
# again, and the K after which it takes off what their base has added.
BASE = 2.0**23
WINDOW = 512
CORRECTED = 2 * WINDOW
# A unit of the scales' grid, and of a sum read as a float.
GRID, UNIT = 2.0**104, 2.0**-149


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float64, for integers in the range of normal numbers."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def telescoped_shift(a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return the exponent of two in the telescoped schedule's scales: ⌈m/block⌉×⌈n/block⌉.

    It is as large as keeps the largest product of a row of A's scales and one of B's below 2^126.
    """
    most = [
        ((scale.view(torch.int32) & 0x7FFFFFFF).amax(dim=1) >> 23) - 127
        for scale in (a_scale.contiguous(), b_scale.contiguous())
    ]
    return (124 - most[0][:, None] - most[1]).clamp(22, 250)


def telescoped_scale(
    a_scale: torch.Tensor, b_scale: torch.Tensor, shift: torch.Tensor, i: int
) -> torch.Tensor:
    """Return block i's products of scales times 2^shift, in steps of 2^104: ⌈m/block⌉×⌈n/block⌉.

    On that grid they have 22 bits, so that their differences and sums are exact.
    """
    product = (a_scale[:, i, None] * b_scale[None, :, i]).double()
    return ((product * power_of_two(shift) / GRID).round() * GRID).float()


def gemm_telescoped(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    block: int,
    chains: int = 1,
) -> torch.Tensor:
    """Return the product as the telescoped schedule rounds it: `gemm`'s arguments and result.

    The integer sums S run on over a window of K, from 2^23: below 2^24 their bits are those of the
    float (2^23 + S)·2^-149, for which a power of two in the scales makes up. By summation by parts
    Σ s_b·(S_b − S_{b−1}) = Σ (s_b − s_{b+1})·S_b, s_{b+1} being zero after a window's last block:
    one fp32 FMA per block. What 2^23 adds is taken off after every 1024 of K and at the end.

    Args:
        chains: sums that take blocks of K in turn, of which each telescopes over its own blocks;
            the interleaved schedule has two.
    """
    m, k = a.shape
    n, count = b.shape[0], a_scale.shape[1]
    c = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    shift = telescoped_shift(a_scale, b_scale)
    zero = torch.zeros(shift.shape, dtype=torch.float32, device=a.device)
    sums = [zero] * chains
    for i in range(count):
        part, end = slice(i * block, min(k, (i + 1) * block)), (i + 1) * block
        chain, own = i % chains, i // chains * block  # K of the chain's before
        if own % WINDOW == 0:
            sums[chain] = torch.full((m, n), BASE, dtype=torch.float64, device=a.device)
        if i * block % CORRECTED == 0:
            added = zero
        sums[chain] += a[:, part].double() @ b[:, part].double().t()
        factor = telescoped_scale(a_scale, b_scale, shift, i)
        if i + chains < count and (own + block) % WINDOW:
            factor = factor - telescoped_scale(a_scale, b_scale, shift, i + chains)
        c = fma(spread(factor, block, m, n), (sums[chain] * UNIT).float(), c)
        added = added + BASE * UNIT * factor
        if i == count - 1 or end % CORRECTED == 0:
            c = c - spread(added, block, m, n)
    return c * spread(power_of_two(149 - shift).float(), block, m, n)


def gemm_float64(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """Return the product of exactly dequantised operands, in float64: m×n.

    It is done in slabs of rows, so that beside B and the result at most 2^26 numbers are held.
    """
    m, k = a.shape
    c = torch.empty((m, b.shape[0]), dtype=torch.float64, device=a.device)
    wide_b = dequantize(b, b_scale, block, torch.float64).t()
    rows = block * max(1, (1 << 26) // max(1, k * block))
    for top in range(0, m, rows):
        slab = slice(top, min(m, top + rows))
        scale = a_scale[top // block : -(-slab.stop // block)]
        torch.mm(dequantize(a[slab], scale, block, torch.float64), wide_b, out=c[slab])
    return c
