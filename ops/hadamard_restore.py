"""Hadamard restoring: the INT8 codes of what a weight's 4-bit codes stand for, transposed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Group, Problem
from jetfire.core.tensors import (
    Quantized,
    Quantized4,
    Spec,
    Specs,
    Tensors,
    ceil_div,
    quantized,
)
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

__all__ = ["int4_restore"]


@dataclass(frozen=True)
class HadamardRestoreProblem(Problem):
    """Wide codes C (m×n) and step (1,) to qt and scale_t, n×m, of step·C·blockdiag(H/√group)."""

    group: Group = 32
    block: Block = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n % self.group:
            raise UsageError(f"group={self.group} with n={self.n}: expected a divisor of n")


class HadamardRestore(StandardOp):
    name = "hadamard_restore"
    summary = "INT8 codes of what a weight's 4-bit codes stand for, transposed"
    Problem = HadamardRestoreProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": out, "n": inp} for out, inp in dict.fromkeys(model.linears())]

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole groups."""
        return {**fields, "n": ceil_div(fields["n"], fields["group"]) * fields["group"]}

    def reads(self, problem: HadamardRestoreProblem) -> Specs:
        return {"wide": Spec("int8", (problem.m, problem.n)), "step": Spec("fp32", (1,))}

    def writes(self, problem: HadamardRestoreProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout="qt")

    def drawn(self, problem: HadamardRestoreProblem, source: Source) -> Tensors:
        """Draw numbers, and round them to steps."""
        from jetfire.reference.hadamard_quantize import quantize
        from jetfire.reference.measured_step import measured_step
        from jetfire.reference.nibbles import widen

        x = source.floats(problem.m, problem.n)
        step = measured_step(x.double().nan_to_num(0.0, 0.0, 0.0)).float()
        return {"wide": widen(quantize(x, step, problem.group)[0]), "step": step}

    def reference(self, problem: HadamardRestoreProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.hadamard_restore import hadamard_restore

        found = hadamard_restore(**inputs, group=problem.group, block=problem.block)
        return dict(zip(("qt", "scale_t"), found, strict=True))

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        codes = Quantized4(None, inputs["wide"], inputs["step"])
        return {"x": codes, "group": fields["group"], "block": fields["block"]}

    def edges(self, problem: HadamardRestoreProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw steps of any size, and some that are none."""
        from jetfire.measure import edges

        steps = (0.0, 2.0**-60, 1.0, 2.0**60, float("nan"), float("inf"))
        return {"step": edges.throughout(rng, steps, inputs["step"])}

    def eager(self, problem: HadamardRestoreProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 transpose of the same numbers, the transform as a product."""
        import torch

        from jetfire.reference.hadamard import matrix

        wide, step = inputs["wide"], inputs["step"].bfloat16() / 16
        h = matrix(problem.group).to(wide.device, torch.bfloat16)

        def run() -> Tensor:
            codes = wide.view(-1, problem.group).to(torch.bfloat16)
            return (codes * step @ h).view_as(wide).t().contiguous()

        return run


OP = HadamardRestore()

_hadamard_restore = Operator(
    "hadamard_restore(Tensor wide, Tensor step, int group, int block) -> (Tensor, Tensor)"
)


@checked
def int4_restore(x: Quantized4, *, group: Group = 32, block: Block = 128) -> Quantized:
    """Return the codes of the transpose (n×m) of what wide codes (m×n) stand for.

    Args:
        x: of `int4_quantize`, with wide codes.
        group: the columns that were transformed together.
        block: of the codes that are returned.
    """
    if x.wide is None:
        raise UsageError("x lacks wide codes: expected layout=wide or both")
    expect.matrix("x", x.wide, ("int8",))
    expect.scalar("x's scale", x.scale, x.wide)
    expect.choice("group", group, Group)
    expect.choice("block", block, Block)
    return Quantized.of(_hadamard_restore(x.wide, x.scale.view(1), group, block), "q", block)
