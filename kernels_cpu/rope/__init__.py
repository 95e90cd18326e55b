"""Rotary position embeddings on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.rope import rope


class TorchRope(TorchKernel):
    op = "rope"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        return {"y": rope(inputs["x"], inputs["cos"], inputs["sin"], problem.inverse)}


KERNELS = (TorchRope(),)
