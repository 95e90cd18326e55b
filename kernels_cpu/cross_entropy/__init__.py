"""Softmax cross-entropy on the CPU, in fp32."""

from __future__ import annotations

import math
from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.cross_entropy import IGNORED


class TorchCrossEntropy(TorchKernel):
    op = "cross_entropy"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if problem.mode == "bwd":
            return {"dlogits": backward(inputs, problem.columns)}
        targets, valid = inputs["targets"], problem.columns
        logits = inputs["logits"][:, :valid].float()
        known, target = _known(targets, valid)
        lse = torch.logsumexp(logits, dim=1)
        lse = lse.masked_fill(lse == math.inf, math.nan)
        loss = (lse - logits.gather(1, target)[:, 0]).masked_fill(~known, math.nan)
        return {"loss": loss.masked_fill(targets == IGNORED, 0.0), "lse": lse}


def _known(targets: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are columns, and as a column the targets, with 0 for the others."""
    known = (targets >= 0) & (targets < valid)
    return known, torch.where(known, targets, 0)[:, None]


def backward(inputs: Tensors, valid: int) -> torch.Tensor:
    """Return the gradient in the logits, fp32 m×n, of which `valid` columns are no padding."""
    targets, logits = inputs["targets"], inputs["logits"]
    known, target = _known(targets, valid)
    gradient = (logits[:, :valid].float() - inputs["lse"][:, None]).exp_()
    gradient.scatter_add_(1, target, torch.full_like(inputs["lse"], -1.0)[:, None])
    gradient *= inputs["dloss"].masked_fill(~known, math.nan)[:, None]
    gradient.masked_fill_((targets == IGNORED)[:, None], 0.0)
    return torch.nn.functional.pad(gradient, (0, logits.shape[1] - valid))


KERNELS = (TorchCrossEntropy(),)
