"""SwiGLU's silu(gate)·up and its gradients on the CPU: the reference's formulas in fp32."""

from __future__ import annotations

from typing import Any

from jetfire.core.tensors import Tensors, with_transpose
from jetfire.kernels_cpu.common import TorchKernel, quantised
from jetfire.reference.dequantize import dequantize
from jetfire.reference.philox import STREAM_ROUNDING, STREAM_SECOND
from jetfire.reference.quantize import quantize
from jetfire.reference.swiglu import silu, silu_grad


class TorchSwiglu(TorchKernel):
    op = "swiglu"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        gate, up, *rest = (
            dequantize(inputs[name], inputs[f"{name}_scale"], problem.block)
            for name in ("gate", "up", "dy")
            if name in inputs
        )
        if problem.mode == "fwd":
            return quantised(silu(gate) * up, problem, inputs)
        (dy,) = rest
        results: Tensors = {}
        for name, value, stream in (
            ("dgate", dy * silu_grad(gate) * up, STREAM_ROUNDING),
            ("dup", dy * silu(gate), STREAM_SECOND),
        ):
            seed = inputs.get("seed")
            codes = quantize(value, problem.out_block, problem.rounding, seed, stream)
            results |= with_transpose(*codes, name)
        return results


KERNELS = (TorchSwiglu(),)
