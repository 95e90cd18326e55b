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
        targets, valid = inputs["targets"], problem.columns
        logits = inputs["logits"][:, :valid].float()
        known, ignored = (targets >= 0) & (targets < valid), targets == IGNORED
        target = torch.where(known, targets, 0)[:, None]
        if problem.mode == "fwd":
            lse = torch.logsumexp(logits, dim=1)
            lse = lse.masked_fill(lse == math.inf, math.nan)
            loss = (lse - logits.gather(1, target)[:, 0]).masked_fill(~known, math.nan)
            return {"loss": loss.masked_fill(ignored, 0.0), "lse": lse}
        gradient = (logits - inputs["lse"][:, None]).exp_()
        gradient.scatter_add_(1, target, torch.full_like(inputs["lse"], -1.0)[:, None])
        gradient *= inputs["dloss"].masked_fill(~known, math.nan)[:, None]
        gradient.masked_fill_(ignored[:, None], 0.0)
        return {"dlogits": torch.nn.functional.pad(gradient, (0, problem.n - valid))}


KERNELS = (TorchCrossEntropy(),)
