"""INT8 codes to packed 4-bit ones, unbiased: what is kept of an activation for backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Problem
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.measure.data import Source
from jetfire.measure.int4 import packed_specs
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_pack"]


@dataclass(frozen=True)
class HadamardPackProblem(Problem):
    """Codes q (m×n) to 4-bit codes of their Hadamard transform, 32 of a row at a time.

    ``packed`` has two codes per byte, ``steps`` a step per group of 32. The codes' own scales stay
    as they are. Codes are rounded stochastically.
    """


class HadamardPack(StandardOp):
    name = "hadamard_pack"
    summary = "INT8 codes to packed 4-bit codes of their Hadamard transform, unbiased"
    Problem = HadamardPackProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.inputs()

    def reads(self, problem: HadamardPackProblem) -> Specs:
        return {"q": Spec("int8", (problem.m, problem.n)), "seed": Spec("int64", (1,))}

    def writes(self, problem: HadamardPackProblem) -> Specs:
        return packed_specs(problem.m, problem.n)

    def drawn(self, problem: HadamardPackProblem, source: Source) -> Tensors:
        return {"q": source.quantised(problem.m, problem.n, 32)[0], "seed": source.seed()}

    def reference(self, problem: HadamardPackProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.hadamard_pack import hadamard_pack

        packed, steps = hadamard_pack(inputs["q"], inputs["seed"])
        return {"packed": packed, "steps": steps}

    def eager(self, problem: HadamardPackProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same of BF16 values, the transform as a product."""
        import torch

        from jetfire.reference.hadamard import matrix
        from jetfire.reference.hadamard_pack import MOST, alternated
        from jetfire.reference.nibbles import pack

        x = alternated(inputs["q"]).unflatten(1, (-1, 32)).bfloat16()
        h = matrix(32).to(x)

        def run() -> tuple[Tensor, Tensor]:
            t = x @ h
            step = t.abs().amax(dim=2, keepdim=True) / MOST
            codes = (t / step + torch.rand_like(t)).floor().clamp(-MOST, MOST)
            return pack(codes.to(torch.int8).flatten(1)), step

        return run


OP = HadamardPack()

_hadamard_pack = Operator("hadamard_pack(Tensor q, Tensor seed) -> (Tensor, Tensor)")


@checked
def int4_pack(q: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the INT8 codes of a matrix (m×n) as packed 4-bit ones, and a step for 32 of a row.

    What `int4_unpack` makes of them, and of the matrix's own scales, is that matrix in the mean.

    Args:
        q: int8, in [-127, 127].
        seed: int64, one element, of the stochastic rounding.

    Returns:
        packed, int8 m×16·⌈n/32⌉, and steps, int8 m×⌈n/32⌉: 0.53 bytes per code.
    """
    expect.matrix("q", q, ("int8",))
    packed, steps = _hadamard_pack(q, expect.seed_on(seed, q))
    return packed, steps
