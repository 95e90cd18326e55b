"""Bit splitting of a gradient in INT8: scales say its unit, and no pass makes floats of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized, Quantized4, Spec, Specs, Tensors, quantized
from jetfire.measure.int4 import Bits, SplitProblem, split_in_torch
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_bit_split_codes"]


@dataclass(frozen=True)
class BitSplitCodesProblem(SplitProblem):
    """(q, scale) of an m×n tensor to packed codes of `bits` bits, unit and each row's Σ codes².

    As `BitSplitProblem`, but for the unit: the largest scale over 98/127, or with 4 bits 7/127.
    """

    block: Block = 32
    bits: Bits = 8


class BitSplitCodes(StandardOp):
    name = "bit_split_codes"
    summary = "a gradient in INT8 as two 4-bit parts, the low one rounded stochastically"
    Problem = BitSplitCodesProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.outputs()

    def reads(self, problem: BitSplitCodesProblem) -> Specs:
        seed: Specs = {"seed": Spec("int64", (1,))} if problem.bits == 8 else {}
        return quantized(problem.m, problem.n, problem.block) | seed

    def writes(self, problem: BitSplitCodesProblem) -> Specs:
        rows = problem.rows
        q, squares = Spec("int8", (rows, problem.n // 2)), Spec("int32", (rows,))
        return {"parts": q, "unit": Spec("fp32", (1,)), "squares": squares}

    def reference(self, problem: BitSplitCodesProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.bit_split_codes import bit_split_codes

        codes = inputs["q"], inputs["scale"], problem.block
        parts, unit, squares = bit_split_codes(*codes, problem.bits, inputs.get("seed"))
        return {"parts": parts, "unit": unit, "squares": squares}

    def eager(self, problem: BitSplitCodesProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return that of `bit_split`, of BF16 values."""
        from jetfire.reference.dequantize import dequantize

        x = dequantize(inputs["q"], inputs["scale"], problem.block).bfloat16()
        return lambda: split_in_torch(problem.bits, x)


OP = BitSplitCodes()

_bit_split_codes = Operator(
    "bit_split_codes(Tensor q, Tensor scale, Tensor? seed, int block, int bits)"
    " -> (Tensor, Tensor, Tensor)"
)


@checked
def int4_bit_split_codes(x: Quantized, *, bits: Bits = 8, seed: Tensor | None = None) -> Quantized4:
    """Return a gradient in INT8 (m×n) as scale·(14·hi + lo), lo rounded stochastically.

    Args:
        bits: 8; or 4 for scale·q alone, rounded to nearest, which needs no seed.

    Returns:
        Packed codes in [−7, 7], with squares: hi's rows above lo's, 2m; of 4 bits m.
    """
    q, scale = expect.quantized("x", x)
    expect.choice("bits", bits, Bits)
    seed = expect.seed_on(seed, q) if bits == 8 else None
    parts, unit, squares = _bit_split_codes(q, scale, seed, x.block, bits)
    return Quantized4(parts, None, unit, squares)
