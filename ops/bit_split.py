"""Bit splitting: a gradient as two parts of 4 bits each, with the sizes of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import FloatName
from jetfire.core.suites import COMPILED, STEADY_MS, Timed
from jetfire.core.tensors import Quantized4, Spec, Specs, Tensors
from jetfire.measure.int4 import Bits, SplitProblem, split_in_torch
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_bit_split"]


@dataclass(frozen=True)
class BitSplitProblem(SplitProblem):
    """x (m×n, `dtype`) to packed codes of `bits` bits, their unit and each row's Σ codes².

    8 bits are two parts, x ≈ unit·(14·hi + lo), the low one rounded stochastically; 4 are one,
    rounded to nearest. An x with NaN or ±Inf has unit NaN, and codes of 0 but for the first
    element's, which is 1: so the first row is never left out, and a product with it is NaN.

    No code is known before the last element's magnitude: x is read twice, from memory where it does
    not fit in a cache, while `bytes` counts it once.
    """

    dtype: FloatName = "bf16"
    bits: Bits = 8


class BitSplit(StandardOp):
    name = "bit_split"
    summary = "a gradient as two 4-bit parts, the low one rounded stochastically"
    Problem = BitSplitProblem
    same_bits_over = "kernels"

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.outputs()

    def reads(self, problem: BitSplitProblem) -> Specs:
        seed: Specs = {"seed": Spec("int64", (1,))} if problem.bits == 8 else {}
        return {"x": Spec(problem.dtype, (problem.m, problem.n))} | seed

    def writes(self, problem: BitSplitProblem) -> Specs:
        rows = problem.rows
        q, squares = Spec("int8", (rows, problem.n // 2)), Spec("int32", (rows,))
        return {"q": q, "unit": Spec("fp32", (1,)), "squares": squares}

    def reference(self, problem: BitSplitProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.bit_split import bit_split

        q, unit, squares = bit_split(inputs["x"], problem.bits, inputs.get("seed"))
        return {"q": q, "unit": unit, "squares": squares}

    def timed(self) -> list[Timed]:
        at = partial(Timed, "int4", sizes={"m": [8192], "n": [8192]}, rounds=20)
        return [
            at(turn=3, peers=COMPILED, power_ms=STEADY_MS),
            at(turn=5, settings={"bits": ["4"]}, peers=("copy",)),
        ]

    def eager(self, problem: BitSplitProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same as plain torch writes it, in the input's own dtype."""
        return lambda: split_in_torch(problem.bits, inputs["x"])


OP = BitSplit()

_bit_split = Operator(
    "bit_split(Tensor x, Tensor? seed, int bits) -> (Tensor, Tensor, Tensor)",
    dtype_field="dtype",
)


@checked
def int4_bit_split(x: Tensor, *, bits: Bits = 8, seed: Tensor | None = None) -> Quantized4:
    """Return a gradient (m×n bf16, fp16 or fp32) as scale·(14·hi + lo), lo rounded stochastically.

    Args:
        bits: 8; or 4 for scale·q alone, rounded to nearest, which needs no seed.

    Returns:
        Packed codes in [−7, 7], with squares: hi's rows above lo's, 2m; of 4 bits m.
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.choice("bits", bits, Bits)
    seed = expect.seed_on(seed, x) if bits == 8 else None
    q, unit, squares = _bit_split(x, seed, bits)
    return Quantized4(q, None, unit, squares)
