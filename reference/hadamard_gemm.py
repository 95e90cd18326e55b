"""A linear layer in 4 bits, forward and backward, from the references of its steps.

"Training Transformers with 4-bit Integers" (arXiv 2306.11987), sections 3 and 4. A step's
result is rounded to the layer's dtype before the next one reads it, as kernels store it.
"""

from __future__ import annotations

import torch

from jetfire.reference import int4_gemm
from jetfire.reference.bit_split import bit_split
from jetfire.reference.gather_rows import gather_rows
from jetfire.reference.hadamard_quantize import gathered, input_gradient, quantize, step_terms
from jetfire.reference.nibbles import narrow, pack, unpack
from jetfire.reference.sample_rows import sample_rows


def forward(
    x: torch.Tensor, w: torch.Tensor, step_x: torch.Tensor, step_w: torch.Tensor, group: int
) -> dict[str, torch.Tensor]:
    """Return x·wᵀ by the codes of both.

    Args:
        x: m×k; w: n×k, of x's dtype.
        step_x, step_w: fp32 (1,).

    Returns:
        c (m×n, x's dtype), and what backward keeps of x: q (packed codes), squares (m int32).
    """
    x_codes, x_scale, squares = quantize(x, step_x, group)
    w_codes, w_scale, _ = quantize(w, step_w, group)
    c = int4_gemm.forward(x_codes, x_scale, w_codes, w_scale)
    return {"c": c.to(x.dtype), "q": pack(x_codes), "squares": squares}


def backward(
    g: torch.Tensor,
    q: torch.Tensor,
    squares: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    wt: torch.Tensor,
    seeds: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: int,
) -> dict[str, torch.Tensor]:
    """Return the gradients of x and w, from half of the rows of the split gradient each.

    Args:
        g: m×n, the output's gradient.
        q, squares, x_scale: x's packed codes (m×k/2), Σ codes² of their rows, and their step.
        w: n×k, of g's dtype; w_scale: its step; wt: its wide codes transposed, k×n.
        seeds: int64 of one element each: of the split, of the rows for x's gradient and of those
            for w's.

    Returns:
        dx (m×k) and dw (n×k), of g's dtype; dstep_terms (float64 n×k): each element's part of the
        step of w's gradient.
    """
    m = len(squares)
    codes, unit, g_squares = bit_split(g, 8, seeds[0])
    room = 2 * (m + 127)
    kept = sample_rows(g_squares, seeds[1], 2, "half", room)
    rows, columns = gather_rows(codes, kept["rows"], kept["counts"]), narrow(wt)
    dx_hat = int4_gemm.dgrad(rows, unit, columns, w_scale, kept["weight"], kept["counts"])
    dx_hat = dx_hat.to(g.dtype)
    if len(dx_hat) == 0:  # nothing to be indexed where the gradient is 0
        dx_hat = dx_hat.new_zeros((1, wt.shape[0]))
    dx = input_gradient(gathered(dx_hat, kept["slots"], unit), unpack(q), group)
    kept = sample_rows(g_squares, seeds[2], 2, "half", room, squares)
    chosen = kept["rows"], kept["counts"]
    gt = gather_rows(codes, *chosen, kept["repeat"], transpose=True)
    xt = gather_rows(q, *chosen, transpose=True)
    dw_hat = int4_gemm.wgrad(gt, unit, xt, x_scale, kept["counts"]).to(g.dtype)
    w_codes, terms = step_terms(dw_hat, w, w_scale, group)
    dw = input_gradient(dw_hat, w_codes, group)
    return {"dx": dx.to(g.dtype), "dw": dw.to(g.dtype), "dstep_terms": terms}
