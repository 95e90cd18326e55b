"""Per-block INT8 codes of the gradient of softmax cross-entropy in its logits.

Quantisation as in Jetfire (arXiv 2403.12422, section 4.1), of the exact gradient rounded once.
"""

from __future__ import annotations

import torch

from jetfire.reference.cross_entropy import backward, log_softmax
from jetfire.reference.quantize import quantize


def quantize_dlogits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    valid: int,
    block: int,
    rounding: str = "nearest",
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes int8 m×n and scales fp32 ⌈m/block⌉×⌈n/block⌉ of `cross_entropy.backward`."""
    gradient = backward(logits, targets, lse, dloss, valid)
    return quantize(gradient, block, rounding, seed)


def terms(
    logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p = exp(logits − lse), |logits − lse| and [column = target], m×valid float64.

    Rows whose target is no column have no one.
    """
    exponent = log_softmax(logits[:, :valid], lse)
    columns = torch.arange(valid, device=logits.device)
    return exponent.exp(), exponent.abs(), (targets[:, None] == columns).double()
