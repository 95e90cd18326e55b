"""Per-block quantisation of three matrices side by side on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel, quantised


class TorchQuantizeQkv(TorchKernel):
    op = "quantize_qkv"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        parts = [inputs[name] for name in ("query", "key", "value")]
        return quantised(torch.cat(parts, dim=1), problem, inputs)


KERNELS = (TorchQuantizeQkv(),)
