"""Bit splitting: a gradient as two parts of 4 bits each, with the sizes of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import Check, FloatName, Op, Problem, SameBits, Tensors
from jetfire.core.errors import UsageError
from jetfire.core.operators import Operator, dtype_of_first
from jetfire.core.suites import COMPILED, Timed
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int4_bit_split"]


Bits = Literal[8, 4]


@dataclass(frozen=True)
class BitSplitProblem(Problem):
    """x (m×n, `dtype`) to packed codes of `bits` bits, their unit and each row's Σ codes².

    8 bits are two parts, x ≈ unit·(14·hi + lo), the low one rounded stochastically; 4 are one,
    rounded to nearest. An x with NaN or ±Inf has unit NaN, and codes of 0 but for the first
    element's, which is 1: so the first row is never left out, and a product with it is NaN.

    No code is known before the last element's magnitude: x is read twice, from memory where it does
    not fit in a cache, while `bytes` counts it once.
    """

    dtype: FloatName = "bf16"
    bits: Bits = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n % 2:
            raise UsageError(f"n={self.n}: expected an even number, of two codes a byte")

    @property
    def rows(self) -> int:
        """Of the codes."""
        return self.m * (2 if self.bits == 8 else 1)


class BitSplit(Op):
    name = "bit_split"
    summary = "a gradient as two 4-bit parts, the low one rounded stochastically"
    Problem = BitSplitProblem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = dict.fromkeys(out for out, _ in model.linears())
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: BitSplitProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        inputs = {"x": source.floats(problem.m, problem.n, dtype=problem.dtype)}
        if problem.bits == 8:
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: BitSplitProblem, inputs: Tensors) -> Tensors:
        import torch

        device = inputs["x"].device
        return {
            "q": torch.empty((problem.rows, problem.n // 2), dtype=torch.int8, device=device),
            "unit": torch.empty(1, dtype=torch.float32, device=device),
            "squares": torch.empty(problem.rows, dtype=torch.int32, device=device),
        }

    def reference(self, problem: BitSplitProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.bit_split import bit_split

        q, unit, squares = bit_split(inputs["x"], problem.bits, inputs.get("seed"))
        return {"q": q, "unit": unit, "squares": squares}

    def check(
        self,
        problem: BitSplitProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.every(
            [check.exact(name, out, expected[name]) for name, out in outputs.items()]
        )

    def same_bits(self, problem: BitSplitProblem) -> SameBits:
        return "kernels"

    def timed(self) -> list[Timed]:
        at = partial(Timed, "int4", sizes={"m": [8192], "n": [8192]}, rounds=20)
        return [
            at(turn=3, peers=COMPILED, power_ms=200.0),
            at(turn=5, settings={"bits": ["4"]}, peers=("copy",)),
        ]

    def peers(
        self, problem: BitSplitProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The same as plain torch writes it, in the input's own dtype."""
        from jetfire.measure import peers

        x = inputs["x"]
        return peers.elementwise(lambda: self.eager(problem, x), self.bytes(problem), x.device)

    def eager(self, problem: BitSplitProblem, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Packed codes, unit and squares by plain torch."""
        import torch

        from jetfire.reference.bit_split import HIGH, LARGEST, MOST
        from jetfire.reference.nibbles import pack

        unit = x.abs().amax() / MOST[problem.bits]
        v = x / unit
        if problem.bits == 4:
            codes = v.round()
        else:
            high = (v / HIGH).round()
            low = (v - HIGH * high + torch.rand_like(v)).floor()
            codes = torch.cat([high, low])
        q = codes.clamp(-LARGEST, LARGEST).to(torch.int8)
        return pack(q), unit, codes.square().sum(dim=1, dtype=torch.float32)


OP = BitSplit()

_bit_split = Operator(
    "bit_split(Tensor x, Tensor? seed, int bits) -> (Tensor, Tensor, Tensor)",
    derive=dtype_of_first,
)


@checked
def int4_bit_split(
    x: Tensor, *, bits: Bits = 8, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient (m×n bf16, fp16 or fp32) as unit·(14·hi + lo), lo rounded stochastically.

    Args:
        bits: 8; or 4 for unit·q alone, rounded to nearest, which needs no seed.

    Returns:
        Packed codes in [−7, 7], hi's rows above lo's (2m×n/2; of 4 bits m×n/2), the unit (fp32,
        one element) and the sum of the squares of each row's codes (int32, 2m or m).
    """
    expect.matrix("x", x, expect.FLOATS)
    expect.choice("bits", bits, Bits)
    seed = expect.seed_on(seed, x) if bits == 8 else None
    return _bit_split(x, seed, bits)
