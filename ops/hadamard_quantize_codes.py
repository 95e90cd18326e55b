"""The Hadamard quantiser of a matrix in INT8: it reads a byte per number, and adds integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Codes, Group, Problem
from jetfire.core.tensors import Quantized, Quantized4, Spec, Specs, Tensors, ceil_div, quantized
from jetfire.measure.data import Source
from jetfire.measure.int4 import codes_in_torch, first_step, whole_groups
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_quantize_codes"]


@dataclass(frozen=True)
class HadamardQuantizeCodesProblem(Problem):
    """(q, scale) of an m×n tensor and step (1,) to 4-bit codes of X·blockdiag(H/√group).

    As `HadamardQuantizeProblem` forward: packed (int8 m×n/2) and wide (int8 m×n) as `layout` says,
    unit (1,), the step, NaN where a scale or the step is not finite, and squares (m,) int32. A
    group lies within a block.
    """

    block: Block = 32
    group: Group = 32
    layout: Codes = "packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_groups("n", self.n, self.group)
        if self.group > self.block:
            raise UsageError(f"group={self.group}: expected at most block={self.block}")


class HadamardQuantizeCodes(StandardOp):
    name = "hadamard_quantize_codes"
    summary = "Hadamard transform of INT8 codes, and rounding to 4-bit codes"
    Problem = HadamardQuantizeCodesProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.inputs()

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole groups, none wider than a block."""
        group = min(fields["group"], fields["block"])
        unit = max(2, group)
        return {**fields, "group": group, "n": ceil_div(fields["n"], unit) * unit}

    def reads(self, problem: HadamardQuantizeCodesProblem) -> Specs:
        codes = quantized(problem.m, problem.n, problem.block)
        return codes | {"step": Spec("fp32", (1,))}

    def writes(self, problem: HadamardQuantizeCodesProblem) -> Specs:
        m, n = problem.m, problem.n
        codes = {"packed": Spec("int8", (m, n // 2)), "wide": Spec("int8", (m, n))}
        if problem.layout != "both":
            del codes["packed" if problem.layout == "wide" else "wide"]
        return codes | {"unit": Spec("fp32", (1,)), "squares": Spec("int32", (m,))}

    def drawn(self, problem: HadamardQuantizeCodesProblem, source: Source) -> Tensors:
        """Draw LSQ's first step."""
        from jetfire.reference.dequantize import dequantize

        q, scale = source.quantised(problem.m, problem.n, problem.block)
        x = dequantize(q, scale, problem.block)
        return {"q": q, "scale": scale, "step": first_step(x, problem.group)}

    def reference(self, problem: HadamardQuantizeCodesProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.hadamard_quantize_codes import quantize_codes
        from jetfire.reference.nibbles import pack, widen

        given = inputs["q"], inputs["scale"], inputs["step"], problem.block, problem.group
        codes, unit, squares = quantize_codes(*given)
        return {"packed": pack(codes), "wide": widen(codes), "unit": unit, "squares": squares}

    def nothing(
        self, problem: HadamardQuantizeCodesProblem, inputs: Tensors, outputs: Tensors
    ) -> None:
        """Write the step for the unit, or NaN where it is no step."""
        import torch

        from jetfire.reference.hadamard_quantize import multiplier

        super().nothing(problem, inputs, outputs)
        bad = multiplier(inputs["step"], problem.group) == 0
        outputs["unit"].copy_(inputs["step"].masked_fill(bad, torch.nan))

    def edges(self, problem: HadamardQuantizeCodesProblem, inputs: Tensors, rng: Random) -> Tensors:
        from jetfire.measure import edges

        return {"step": edges.step(rng, inputs["step"])}

    def eager(self, problem: HadamardQuantizeCodesProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return that of `hadamard_quantize`, of BF16 values."""
        from jetfire.reference.dequantize import dequantize
        from jetfire.reference.hadamard import matrix

        x = dequantize(inputs["q"], inputs["scale"], problem.block).bfloat16()
        h = matrix(problem.group).to(x)
        return lambda: codes_in_torch(x, inputs["step"], h, problem.layout)


OP = HadamardQuantizeCodes()

_hadamard_quantize_codes = Operator(
    "hadamard_quantize_codes(Tensor q, Tensor scale, Tensor step, int block, int group, str"
    " layout) -> Tensor[]"
)


@checked
def int4_quantize_codes(
    x: Quantized, step: Tensor, *, group: Group = 32, layout: Codes = "packed"
) -> Quantized4:
    """Return the 4-bit codes of x (m×n in INT8), each `group` columns Hadamard-transformed.

    Args:
        step: fp32, one element: what codes are multiples of.
        group: a power of two that divides n, at most the side of x's blocks.
        layout: "packed", "wide" or "both".

    Returns:
        Codes in [−8, 7], with squares; their scale is NaN if x is not finite or the step not finite
        and above 0.
    """
    q, scale = expect.quantized("x", x)
    expect.scalar("step", step, q)
    expect.choice("group", group, Group)
    expect.choice("layout", layout, Codes)
    found = _hadamard_quantize_codes(q, scale, step.view(1), x.block, group, layout)
    return Quantized4.of(found, layout)
