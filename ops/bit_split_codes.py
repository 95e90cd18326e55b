"""Bit splitting of a gradient in INT8: scales say its unit, and no pass makes floats of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block
from jetfire.core.tensors import Quantized, Quantized4, Spec, Specs, Tensors, quantized
from jetfire.measure.int4 import Bits, SplitProblem, split_in_torch
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_bit_split_codes", "int4_bit_split_codes_sums"]

MOST_ROWS = 1 << 24  # whose column sums of codes times ratios below 2^31 fit in 64 bits


@dataclass(frozen=True)
class BitSplitCodesProblem(SplitProblem):
    """(q, scale) of an m×n tensor to packed codes of `bits` bits, unit and each row's Σ codes².

    As `BitSplitProblem`, but for the unit: the largest scale over 98/127, or with 4 bits 7/127.

    Args:
        sums: each column's sum is written, too.
    """

    block: Block = 32
    bits: Bits = 8
    sums: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sums and self.m > MOST_ROWS:
            raise UsageError(f"m={self.m}: expected at most 2^24, whose sums fit in 64 bits")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without sums where there are none."""
        fields = super().as_dict()
        if not self.sums:
            del fields["sums"]
        return fields


class BitSplitCodes(StandardOp):
    name = "bit_split_codes"
    summary = "a gradient in INT8 as two 4-bit parts, the low one rounded stochastically"
    Problem = BitSplitCodesProblem
    same_bits_over = "kernels"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.outputs()

    def function(self, fields: Mapping[str, Any], names: Sequence[str]) -> str:
        return names[bool(fields.get("sums"))]

    def reads(self, problem: BitSplitCodesProblem) -> Specs:
        seed: Specs = {"seed": Spec("int64", (1,))} if problem.bits == 8 else {}
        return quantized(problem.m, problem.n, problem.block) | seed

    def writes(self, problem: BitSplitCodesProblem) -> Specs:
        rows = problem.rows
        q, squares = Spec("int8", (rows, problem.n // 2)), Spec("int32", (rows,))
        found = {"parts": q, "unit": Spec("fp32", (1,)), "squares": squares}
        return found | ({"sums": Spec("fp32", (problem.n,))} if problem.sums else {})

    def reference(self, problem: BitSplitCodesProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.bit_split_codes import bit_split_codes, column_sums

        q, scale, block = inputs["q"], inputs["scale"], problem.block
        parts, unit, squares = bit_split_codes(q, scale, block, problem.bits, inputs.get("seed"))
        found = {"parts": parts, "unit": unit, "squares": squares}
        return found | ({"sums": column_sums(q, scale, unit, block)} if problem.sums else {})

    def eager(self, problem: BitSplitCodesProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return that of `bit_split`, of BF16 values, and the sum of their rows."""
        import torch

        from jetfire.reference.dequantize import dequantize

        x = dequantize(inputs["q"], inputs["scale"], problem.block).bfloat16()

        def run() -> list[Tensor]:
            sums = [x.sum(dim=0, dtype=torch.float32)] if problem.sums else []
            return [*split_in_torch(problem.bits, x), *sums]

        return run


OP = BitSplitCodes()

_bit_split_codes = Operator(
    "bit_split_codes(Tensor q, Tensor scale, Tensor? seed, int block, int bits)"
    " -> (Tensor, Tensor, Tensor)"
)
_with_sums = Operator(
    "bit_split_codes.sums(Tensor q, Tensor scale, Tensor? seed, int block, int bits)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    sums=True,
)


@checked
def int4_bit_split_codes(x: Quantized, *, bits: Bits = 8, seed: Tensor | None = None) -> Quantized4:
    """Return a gradient in INT8 (m×n) as scale·(14·hi + lo), lo rounded stochastically.

    Args:
        bits: 8; or 4 for scale·q alone, rounded to nearest, which needs no seed.

    Returns:
        Packed codes in [−7, 7], with squares: hi's rows above lo's, 2m; of 4 bits m.
    """
    parts, unit, squares = _bit_split_codes(*_expected(x, bits, seed), x.block, bits)
    return Quantized4(parts, None, unit, squares)


@checked
def int4_bit_split_codes_sums(
    x: Quantized, *, bits: Bits = 8, seed: Tensor | None = None
) -> tuple[Quantized4, Tensor]:
    """Return what `int4_bit_split_codes` does, and x's column sums (fp32, n): a bias's gradient."""
    parts, unit, squares, sums = _with_sums(*_expected(x, bits, seed), x.block, bits)
    return Quantized4(parts, None, unit, squares), sums


def _expected(
    x: Quantized, bits: Bits, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scale and seed, once they and the bits are what is expected."""
    q, scale = expect.quantized("x", x)
    expect.choice("bits", bits, Bits)
    return q, scale, expect.seed_on(seed, q) if bits == 8 else None
