"""Both gradients of a 4-bit product by bit splitting and leverage-score sampling, in float64.

Section 4 and appendix of "Training Transformers with 4-bit Integers" (arXiv 2306.11987). Of
Y = X̂·Ŵᵀ with X̂ = αx·qx (m×k) and Ŵ = αw·qw (n×k), the gradient G (m×n) of Y is split,
G ≈ Δ·(14·hi + lo), and of the 2m rows g_i of [hi; lo], which count c_i = 14 or 1, each product
keeps some:

    dX̂ = Δ·αw·Σ (c_i/p_i)·g_i·qw    in row i mod m
    dŴ = Δ·αx·Σ c_i·r_i·g_iᵀ·qx_{i mod m}

p_i is row i's probability, r_i an integer whose mean is 1/p_i. Over the draws both have the mean
that G itself gives: lo is rounded without bias, and so are the sums.

This module has the products of the kept rows; `sample_rows` says which rows are kept.
"""

from __future__ import annotations

import torch

from jetfire.reference.bit_split import HIGH, bit_split
from jetfire.reference.nibbles import unpack
from jetfire.reference.sample_rows import SEGMENT, sample_rows


def input_gradient(
    codes: torch.Tensor,
    unit: torch.Tensor,
    qw: torch.Tensor,
    w_step: torch.Tensor,
    sampled: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return dX̂ of the kept rows, float64 m×k; 0·unit in a row of which nothing was kept.

    Args:
        codes: int8 parts·m×n: hi above lo, or one part.
        unit: Δ, fp32 (1,).
        qw: int8 n×k; w_step: fp32 (1,).
        sampled: rows, weight and slots, as `sample_rows` gives them.
    """
    products = codes.double() @ qw.double()
    weighed = sampled["weight"].double()[:, None] * products[sampled["rows"].long().clamp(min=0)]
    parts = [
        torch.where(slot[:, None] >= 0, weighed[slot.long().clamp(min=0)], 0.0)
        for slot in sampled["slots"].unbind(1)
    ]
    return unit.double() * w_step.double() * sum(parts)


def weight_gradient(
    codes: torch.Tensor,
    unit: torch.Tensor,
    qx: torch.Tensor,
    x_step: torch.Tensor,
    sampled: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return dŴ of the kept rows, float64 n×k.

    Args:
        codes, unit: as for `input_gradient`.
        qx: int8 m×k; x_step: fp32 (1,).
        sampled: rows, counts and repeat, as `sample_rows` gives them.
    """
    rows, high = sampled["rows"].long(), int(sampled["counts"][0])
    kept = rows.clamp(min=0)
    factor = sampled["repeat"].double()  # 0 for what is no row
    factor[:high] *= HIGH
    sums = (codes[kept].double() * factor[:, None]).t() @ qx[kept % len(qx)].double()
    return unit.double() * x_step.double() * sums


def gradients(
    gradient: torch.Tensor,
    qx: torch.Tensor,
    x_step: torch.Tensor,
    qw: torch.Tensor,
    w_step: torch.Tensor,
    seed: torch.Tensor,
    bits: int = 8,
    keep: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dX̂ (m×k) and dŴ (n×k), float64, of one draw.

    Args:
        gradient: G, m×n, any float dtype, n even.
        qx, qw: int8 m×k and n×k; x_step, w_step: their steps, fp32 (1,).
        seed: int64, one element.
        bits, keep: 8 and "half" are the paper's; "all" samples nothing, and 4 does not split.
    """
    packed, unit, squares = bit_split(gradient, bits, seed)
    codes, parts = unpack(packed), 2 if bits == 8 else 1
    room = parts * -(-len(gradient) // SEGMENT) * SEGMENT
    x_squares = qx.int().square().sum(dim=1, dtype=torch.int32)
    of_x = sample_rows(squares, seed, parts, keep, room)
    of_w = sample_rows(squares, seed, parts, keep, room, x_squares)
    return (
        input_gradient(codes, unit, qw, w_step, of_x),
        weight_gradient(codes, unit, qx, x_step, of_w),
    )
