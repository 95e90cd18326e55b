"""The INT4 GEMM on the CPU: the exact product of codes in bytes."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors
from jetfire.kernels_cpu.common import NoConfig, TorchKernel, integers
from jetfire.reference.bit_split import HIGH
from jetfire.reference.int4_gemm import scaled
from jetfire.reference.nibbles import unpack
from jetfire.reference.quantize import quantize


class IntMm(TorchKernel):
    op = "int4_gemm"
    name = "int_mm"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        """Return ``c``; of a dgrad, the rows that counts say exist."""
        a, b = inputs["a"], inputs["b"]
        weight = inputs.get("weight")
        if problem.product == "dgrad":
            assert weight is not None
            rows = int(inputs["counts"][1])
            a, weight = a[:rows], weight[:rows]
        if problem.operands == "packed":
            a, b = unpack(a), unpack(b)
        if problem.product == "wgrad":
            high, end = inputs["counts"].tolist()
            sums = HIGH * integers(a[:, :high], b[:, :high])
            sums += integers(a[:, high:end], b[:, high:end])
        else:
            sums = integers(a, b) >> (8 if problem.shifted else 0)
        return {"c": scaled(sums, inputs["a_scale"], inputs["b_scale"], weight, inputs.get("bias"))}

    def launch(self, problem: Any, config: NoConfig, inputs: Tensors, outputs: Tensors) -> None:
        with torch.no_grad():
            c = self.compute(problem, inputs)["c"]
            if problem.out == "int8":
                for name, codes in zip(outputs, quantize(c, problem.out_block), strict=True):
                    outputs[name].copy_(codes)
            else:
                outputs["c"][: len(c)].copy_(c)


KERNELS = (IntMm(),)
