"""Hadamard restoring on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import TorchKernel
from jetfire.reference.hadamard_restore import hadamard_restore


class TorchHadamardRestore(TorchKernel):
    op = "hadamard_restore"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        qt, scale_t = hadamard_restore(**inputs, group=problem.group, block=problem.block)
        return {"qt": qt, "scale_t": scale_t}


KERNELS = (TorchHadamardRestore(),)
