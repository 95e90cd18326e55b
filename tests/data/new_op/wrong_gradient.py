"""Softsign with a wrong gradient, of the reference as of the kernel: autograd alone can tell."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import quantised
from jetfire.kernels_cpu.softsign import TorchSoftsign
from jetfire.reference import softsign
from jetfire.reference.dequantize import dequantize


def backward(
    x: torch.Tensor, x_scale: torch.Tensor, dy: torch.Tensor, dy_scale: torch.Tensor, block: int
) -> torch.Tensor:
    """dy/(1 + |x|), which lacks a square."""
    below = 1 + dequantize(x, x_scale, block, torch.float64).abs()
    return dequantize(dy, dy_scale, block, torch.float64) / below


softsign.backward = backward


class WrongGradient(TorchSoftsign):
    name = "wrong-gradient"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        if problem.mode == "fwd":
            return super().compute(problem, inputs)
        operands = (inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
        return quantised(backward(*operands, problem.block).float(), problem, inputs)


KERNELS = (WrongGradient(),)
