"""The Hadamard quantiser and its gradient on the CPU."""

from __future__ import annotations

from typing import Any

from jetfire.kernels_cpu.common import TorchKernel
from jetfire.ops.op import Tensors
from jetfire.reference.hadamard_quantize import gathered, input_gradient, quantize, step_terms
from jetfire.reference.nibbles import pack, unpack, widen


class TorchHadamardQuantize(TorchKernel):
    op = "hadamard_quantize"

    def compute(self, problem: Any, inputs: Tensors) -> Tensors:
        group = problem.group
        if problem.mode == "fwd":
            q, scale, squares = quantize(inputs["x"], inputs["step"], group)
            codes = {"wide": widen(q)} if problem.layout != "packed" else {}
            if problem.layout != "wide":
                codes["q"] = pack(q)
            return codes | {"scale": scale, "squares": squares}
        dx_hat = inputs["dx_hat"]
        if problem.gathered:
            dx_hat = gathered(dx_hat, inputs["slots"], inputs["unit"])
        sums: Tensors = {}
        if problem.given == "x":
            q, terms = step_terms(dx_hat, inputs["x"], inputs["step"], group)
            sums = {"dstep": terms.sum(dim=1)}
        else:
            q = unpack(inputs["q"])
        return {"dx": input_gradient(dx_hat, q, group), **sums}


KERNELS = (TorchHadamardQuantize(),)
