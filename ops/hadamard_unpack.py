"""Packed 4-bit codes to the INT8 codes of the transpose, as a weight's gradient multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Problem
from jetfire.core.tensors import (
    Quantized,
    Spec,
    Specs,
    Tensors,
    blocks_of,
    dtype_of,
    quantized,
)
from jetfire.measure.data import Source
from jetfire.measure.int4 import packed_specs
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_unpack"]


@dataclass(frozen=True)
class HadamardUnpackProblem(Problem):
    """Packed codes, steps and scales of an m×n matrix (`hadamard_pack`) to qt and scale_t, n×m.

    The codes are rounded stochastically, in blocks as those had that were packed.
    """

    block: Block = 32


class HadamardUnpack(StandardOp):
    name = "hadamard_unpack"
    summary = "packed 4-bit codes back to INT8 codes of the transpose, unbiased"
    Problem = HadamardUnpackProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.inputs()

    def reads(self, problem: HadamardUnpackProblem) -> Specs:
        m, n = problem.m, problem.n
        scales = Spec("fp32", blocks_of(m, n, problem.block))
        return packed_specs(m, n) | {"scale": scales, "seed": Spec("int64", (1,))}

    def writes(self, problem: HadamardUnpackProblem) -> Specs:
        return quantized(problem.m, problem.n, problem.block, layout="qt")

    def drawn(self, problem: HadamardUnpackProblem, source: Source) -> Tensors:
        """Draw INT8 codes, and pack them."""
        from jetfire.reference.hadamard_pack import hadamard_pack

        q, scale = source.quantised(problem.m, problem.n, problem.block)
        packed, steps = hadamard_pack(q, source.seed())
        return {"packed": packed, "steps": steps, "scale": scale, "seed": source.seed()}

    def reference(self, problem: HadamardUnpackProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.hadamard_unpack import hadamard_unpack

        found = hadamard_unpack(**inputs, n=problem.n, block=problem.block)
        return dict(zip(("qt", "scale_t"), found, strict=True))

    def eager(self, problem: HadamardUnpackProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the BF16 transpose of the same codes, the transform as a product."""
        import torch

        from jetfire.reference.hadamard import matrix
        from jetfire.reference.nibbles import unpack

        packed, steps = inputs["packed"], inputs["steps"].bfloat16()[:, :, None]
        h = matrix(32).to(steps)

        def run() -> Tensor:
            codes = unpack(packed).unflatten(1, (-1, 32)).to(torch.bfloat16)
            return (codes * steps @ h).flatten(1)[:, : problem.n].t().contiguous()

        return run


OP = HadamardUnpack()

_hadamard_unpack = Operator(
    "hadamard_unpack(Tensor packed, Tensor steps, Tensor scale, Tensor seed, int n, int block)"
    " -> (Tensor, Tensor)",
    derive=lambda packed: {"m": packed[0]},
)


@checked
def int4_unpack(
    packed: Tensor, steps: Tensor, scale: Tensor, seed: Tensor, *, n: int, block: Block = 32
) -> Quantized:
    """Return the codes of the transpose (n×m) of a matrix whose codes `int4_pack` was given.

    Args:
        scale: of the codes that were packed, fp32 ⌈m/block⌉×⌈n/block⌉.
        seed: int64, one element, of the stochastic rounding; any, also that of packing.
        n: the matrix's columns.
        block: of its codes, and of those that are returned.
    """
    expect.matrix("packed", packed, ("int8",))
    expect.choice("block", block, Block)
    m = len(packed)
    specs = packed_specs(m, n) | {"scale": Spec("fp32", blocks_of(m, n, block))}
    given = (
        expect.exactly(name, tensor, expect.named(dtype_of(spec.dtype)), spec.shape, packed)
        for (name, spec), tensor in zip(specs.items(), (packed, steps, scale), strict=True)
    )
    codes = _hadamard_unpack(*given, expect.seed_on(seed, packed), n, block)
    return Quantized.of(codes, "q", block)
