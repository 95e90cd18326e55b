"""Softsign without the absolute value."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import quantised
from jetfire.kernels_cpu.softsign import TorchSoftsign
from jetfire.reference.dequantize import dequantize


class WrongSoftsign(TorchSoftsign):
    name = "wrong-kernel"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if problem.mode == "bwd":
            return super().compute(problem, inputs)
        x = dequantize(inputs["x"], inputs["x_scale"], problem.block)
        return quantised(x / (1 + x), problem, inputs)


KERNELS = (WrongSoftsign(),)
