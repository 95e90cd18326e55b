"""INT8 codes to packed 4-bit ones on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.hadamard_pack import hadamard_pack


class TorchHadamardPack(TorchKernel):
    op = "hadamard_pack"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        packed, steps = hadamard_pack(inputs["q"], inputs["seed"])
        return {"packed": packed, "steps": steps}


KERNELS = (TorchHadamardPack(),)
