"""Softmax cross-entropy on the CPU, in fp32."""

from __future__ import annotations

import math
from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, columns_of, logits_gradient
from jetfire.reference.cross_entropy import IGNORED


class TorchCrossEntropy(TorchKernel):
    op = "cross_entropy"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if problem.mode == "bwd":
            return {"dlogits": logits_gradient(inputs, problem.columns)}
        targets, valid = inputs["targets"], problem.columns
        logits = inputs["logits"][:, :valid].float()
        known, target = columns_of(targets, valid)
        lse = torch.logsumexp(logits, dim=1)
        lse = lse.masked_fill(lse == math.inf, math.nan)
        loss = (lse - logits.gather(1, target)[:, 0]).masked_fill(~known, math.nan)
        return {"loss": loss.masked_fill(targets == IGNORED, 0.0), "lse": lse}


KERNELS = (TorchCrossEntropy(),)
