"""Packed 4-bit codes to INT8 ones on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.hadamard_unpack import hadamard_unpack


class TorchHadamardUnpack(TorchKernel):
    op = "hadamard_unpack"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        qt, scale_t = hadamard_unpack(**inputs, n=problem.n, block=problem.block)
        return {"qt": qt, "scale_t": scale_t}


KERNELS = (TorchHadamardUnpack(),)
