"""Softmax cross-entropy of rows of logits, and its gradient, in float64."""

from __future__ import annotations

import math

import torch

IGNORED = -100  # a target that asks for no loss, as in torch


def log_softmax(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return logits − lse of each row, float64."""
    return logits.double() - lse.double()[:, None]


def forward(
    logits: torch.Tensor, targets: torch.Tensor, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss, lse − logits[target], and lse = log Σ exp(logits), float64.

    Both are NaN where a logit is NaN or ∞. Where all are −∞, lse is −∞ and the loss NaN.

    Args:
        logits: m×n; columns from `valid` on are padding and count as −∞.
        targets: int64, m. The loss is 0 where it is `IGNORED`, NaN where it is no column.
    """
    within = logits[:, :valid].double()
    lse = torch.logsumexp(within, dim=1)
    lse = lse.masked_fill(lse == math.inf, math.nan)
    known = (targets >= 0) & (targets < valid)
    chosen = within.gather(1, torch.where(known, targets, 0)[:, None])[:, 0]
    loss = (lse - chosen).masked_fill(~known, math.nan).masked_fill(targets == IGNORED, 0.0)
    return loss, lse


def backward(
    logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor, valid: int
) -> torch.Tensor:
    """Return dloss·(exp(logits − lse) − [column = target]), m×n float64; 0 in the padding.

    A row is 0 where its target is `IGNORED`, NaN up to the padding where it is no column.
    """
    rows = torch.arange(len(targets), device=logits.device)
    known = (targets >= 0) & (targets < valid)
    gradient = log_softmax(logits[:, :valid], lse).exp()
    gradient[rows[known], targets[known]] -= 1
    gradient *= dloss.double().masked_fill(~known, math.nan)[:, None]
    gradient[targets == IGNORED] = 0
    return torch.nn.functional.pad(gradient, (0, logits.shape[1] - valid))
