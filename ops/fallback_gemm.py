"""Per-block INT8 GEMM of a matrix with fallback: a second plane of codes in some of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Check
from jetfire.core.operators import Operator, of_product
from jetfire.core.problem import Block, FloatName, Problem
from jetfire.core.suites import Timed
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, ceil_div, quantized
from jetfire.measure import peers, products
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp
from jetfire.measure.peers import Factory

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int8_fallback_gemm"]


@dataclass(frozen=True)
class FallbackGemmProblem(Problem):
    """C (m×n) = (A + R) (m×k) · Bᵀ (B n×k), all K-contiguous; R is 0 in blocks of scale 0.

    Where `transpose`, what is written is Cᵀ: a weight's gradient, whose second operand falls back.
    `percent` of A's blocks, rounded up, fall back in what is drawn, for timing; kernels take any.
    """

    k: int
    block: Block = 128
    out: FloatName = "bf16"
    bias: bool = False
    transpose: bool = False
    percent: Literal[0, 5, 20, 50] = 5


class FallbackGemm(StandardOp):
    name = "fallback_gemm"
    summary = "per-block INT8 GEMM whose A has a second plane of codes in blocks with outliers"
    Problem = FallbackGemmProblem
    dims = ("m", "n", "k")
    contiguous = frozenset({"a_scale", "r_scale", "b_scale", "c"})
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"k": ("c",)}
    untuned = True

    def reads(self, problem: FallbackGemmProblem) -> Specs:
        m, n, k, block = problem.m, problem.n, problem.k, problem.block
        specs: Specs = {}
        for name, rows in (("a", m), ("r", m), ("b", n)):
            specs |= quantized(rows, k, block, name)
        return specs | ({"bias": Spec("fp32", (n,))} if problem.bias else {})

    def writes(self, problem: FallbackGemmProblem) -> Specs:
        shape = (problem.n, problem.m) if problem.transpose else (problem.m, problem.n)
        return {"c": Spec(problem.out, shape)}

    def drawn(self, problem: FallbackGemmProblem, source: Source) -> Tensors:
        from jetfire.reference.fallback_quantize import fallback_quantize, threshold_of

        block, a = problem.block, source.floats(problem.m, problem.k)
        threshold = threshold_of(a, block, problem.percent)
        codes = (
            *fallback_quantize(a, block, threshold),
            *source.quantised(problem.n, problem.k, block, operand=1),
        )
        inputs = dict(zip(self.reads(problem), codes, strict=False))
        return inputs | ({"bias": source.normal(problem.n)} if problem.bias else {})

    def reference(self, problem: FallbackGemmProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.fallback_gemm import side_by_side

        a, r, b = ((inputs[name], inputs[f"{name}_scale"]) for name in "arb")
        joined = side_by_side(*a, *r, *b, problem.block)
        operands = dict(zip(products.PARTS, joined, strict=True))
        expected = products.reference({**inputs, **operands}, problem.block)
        return expected | {"c": _turned(problem, expected["c"])}

    def check(
        self,
        problem: FallbackGemmProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: Tensor | None = None,
    ) -> Check:
        got, wanted = (_turned(problem, tensors["c"]) for tensors in (outputs, expected))
        k = 2 * ceil_div(problem.k, problem.block) * problem.block  # of [A | R]
        return products.check_floats(got, {**expected, "c": wanted}, noise, problem.block, k)

    def nothing(self, problem: FallbackGemmProblem, inputs: Tensors, outputs: Tensors) -> None:
        """Write the bias, or zeros."""
        outputs["c"].zero_()
        if problem.bias:
            _turned(problem, outputs["c"]).add_(inputs["bias"])

    def flops(self, problem: FallbackGemmProblem) -> float:
        """Return those of the product without fallback, which is what is asked for."""
        return 2.0 * problem.m * problem.n * problem.k

    def edges(self, problem: FallbackGemmProblem, inputs: Tensors, rng: Random) -> Tensors:
        return products.edges_of(rng, inputs)

    def timed(self) -> list[Timed]:
        """Return a square with each share of blocks that fall back; with none it is plain."""
        settings = {"percent": ["0", "5", "20", "50"]}
        sizes, peers = {"m": [8192]}, ("cublas_bf16",)
        return [Timed("targets", 2, sizes=sizes, blocks=["128"], settings=settings, peers=peers)]

    def peers(self, problem: FallbackGemmProblem, inputs: Tensors) -> dict[str, Factory]:
        return peers.gemm(problem.m, problem.n, problem.k, inputs["a"].device)


def _turned(problem: FallbackGemmProblem, c: Tensor) -> Tensor:
    """Return C of the output, or the output of C: the transpose where the problem asks for Cᵀ."""
    return c.t() if problem.transpose else c


OP = FallbackGemm()

_fallback_gemm = Operator(
    "fallback_gemm(Tensor a, Tensor a_scale, Tensor r, Tensor r_scale, Tensor b, Tensor b_scale,"
    " Tensor? bias, int block, str out, bool transpose) -> Tensor",
    derive=of_product,
)


@checked
def int8_fallback_gemm(
    a: Quantized,
    r: Quantized,
    b: Quantized,
    *,
    out: FloatName = "bf16",
    bias: Tensor | None = None,
    transpose: bool = False,
) -> Tensor:
    """Return (A + R)·Bᵀ + bias, m×n, of A and R (m×k) and B (n×k) in equal blocks.

    Args:
        a, r: as `int8_fallback_quantize` has them. Blocks in which R's scale is 0 cost nothing.
        out: C's dtype.
        bias: fp32, n.
        transpose: return the transpose, n×m and contiguous.
    """
    q, a_scale = expect.quantized("a", a)
    r_q, r_scale = expect.quantized("r", r, a)
    b_q, b_scale = expect.factors(b, a)
    expect.choice("out", out, FloatName)
    if bias is not None:
        bias = expect.vector("bias", bias, b_q.shape[0], q)
    scales = (scale.contiguous() for scale in (a_scale, r_scale, b_scale))
    operands = (part for pair in zip((q, r_q, b_q), scales, strict=True) for part in pair)
    return _fallback_gemm(*operands, bias, a.block, out, transpose)
