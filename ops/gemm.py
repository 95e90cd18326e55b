"""Per-block INT8 GEMM: forward, dgrad and wgrad of a linear layer, all as one NT product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from jetfire.core import expect, workloads
from jetfire.core.arguments import checked, shown
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Check, SameBits, Tuning
from jetfire.core.operators import Differentiable, Operator, of_product
from jetfire.core.problem import AS_READ, Block, FloatName, Layout, Mode, Problem, Rounding
from jetfire.core.suites import STEADY_MS, Exported, Timed
from jetfire.core.tensors import (
    Quantized,
    Spec,
    Specs,
    Tensors,
    ceil_div,
    dtype_of,
    quantized,
    seed_of,
    with_transpose,
)
from jetfire.measure import peers, products
from jetfire.measure.bounds import reblocked
from jetfire.measure.data import OPERANDS, Source
from jetfire.measure.op import StandardOp, draw, unrounded
from jetfire.measure.peers import Factory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["int8_gemm"]


@dataclass(frozen=True)
class GemmProblem(Problem):
    """C (m×n) = A (m×k) · Bᵀ (B n×k), both K-contiguous.

    ``out="int8"`` requantises C in the epilogue, in blocks of `out_block`, with `rounding` and
    `layout`; `accumulate` adds to what a float C holds. With `squares` an fp32 C comes with Σx² of
    each 16 rows and 32 columns, for a norm of C that reads it no more.

    Sums are in fp32, of integers times products of two scales. Where these overflow (from values of
    A times values of B of 2^118 on) C is ±Inf or NaN.
    """

    of_codes: ClassVar[tuple[str, ...]] = ("out_block",)
    extras: ClassVar[tuple[str, ...]] = ("squares",)
    k: int
    block: Block = 32
    out_block: Block = AS_READ
    out: Literal["bf16", "fp16", "fp32", "int8"] = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"
    bias: bool = False
    accumulate: bool = False
    squares: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, free in (("out", "fp32"), ("bias", False), ("accumulate", False)):
            if self.squares and (value := getattr(self, name)) != free:
                raise UsageError(f"squares=true {name}={value}: expected {name}={free}")
        if self.accumulate and self.out == "int8":
            raise UsageError("accumulate=true out=int8: expected out=fp32, bf16 or fp16")
        if self.rounding == "stochastic" and self.out != "int8":
            raise UsageError(f"rounding=stochastic out={self.out}: expected out=int8")
        if self.layout != "q" and self.out != "int8":
            raise UsageError(f"layout={self.layout} out={self.out}: expected out=int8")
        if self.out_block != self.block and self.out != "int8":
            raise UsageError(f"out_block={self.out_block} out={self.out}: expected out=int8")


def squares_shape(m: int, n: int) -> tuple[int, int]:
    """Return how many parts of 16 rows and 32 columns an m×n output has: a warp's smallest."""
    return ceil_div(m, 16), ceil_div(n, 32)


SUITE_KERNELS = ("wgmma", "gluon")
# n and k of DeepGEMM's tests, which it runs with few rows and with many.
DEEP = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
PROMOTION_PEERS = ("cublas_bf16", "fp8_scaled_mm", "fp8_scaled_mm_block")


class Gemm(StandardOp):
    name = "gemm"
    summary = "per-block INT8 GEMM, C = A·Bᵀ with a scale for each block×block tile"
    Problem = GemmProblem
    dims = ("m", "n", "k")
    contiguous = frozenset({"a_scale", "b_scale", "c"})
    modes = ("fwd", "bwd")
    tuning = Tuning(60, "cublas_bf16", "wgmma")
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"k": ("c",)}
    no_gradients = "dgrad and wgrad are its own product, of other operands"

    def problems(self, mode: Mode, fields: Mapping[str, Any]) -> list[Any]:
        """Return forward as it is; backward as dgrad (m×k) and wgrad (n×k, accumulated in fp32).

        dgrad has the output asked for, rounded stochastically where it is int8 and no rounding
        was asked for.
        """
        if mode not in self.modes:
            return super().problems(mode, fields)
        forward = self.Problem.parse(fields)
        if mode == "fwd":
            return [forward]
        m, n, k = forward.m, forward.n, forward.k
        rest = {"bias": False, "accumulate": False}
        dgrad = {**fields, **rest, "m": m, "n": k, "k": n}
        if forward.out == "int8":
            dgrad.setdefault("rounding", "stochastic")
        wgrad = {"m": n, "n": k, "k": m, "block": forward.block, "out": "fp32", "accumulate": True}
        return [self.Problem.parse(dgrad), self.Problem.parse(wgrad)]

    def reads(self, problem: GemmProblem) -> Specs:
        m, n, k, block = problem.m, problem.n, problem.k, problem.block
        specs = quantized(m, k, block, "a") | quantized(n, k, block, "b")
        if problem.bias:
            specs["bias"] = Spec("fp32", (n,))
        if problem.accumulate:
            specs["c"] = Spec(problem.out, (m, n))
        return specs | seed_of(problem)

    def writes(self, problem: GemmProblem) -> Specs:
        if problem.out == "int8":
            return quantized(problem.m, problem.n, problem.out_block, layout=problem.layout)
        written = {"c": Spec(problem.out, (problem.m, problem.n))}
        if problem.squares:
            written["squares"] = Spec("fp32", squares_shape(problem.m, problem.n))
        return written

    def drawn(self, problem: GemmProblem, source: Source) -> Tensors:
        """Draw each operand from its own distribution; a C to add to is normal."""
        inputs: Tensors = {}
        for operand, (name, rows) in enumerate((("a", problem.m), ("b", problem.n))):
            codes, scale = source.quantised(rows, problem.k, problem.block, operand)
            inputs |= {name: codes, f"{name}_scale": scale}
        if problem.bias:
            inputs["bias"] = source.normal(problem.n)
        if problem.accumulate:
            inputs["c"] = source.normal(problem.m, problem.n).to(dtype_of(problem.out))
        return inputs | draw(seed_of(problem), source)

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return squares of fp32 alone, without what they do not go with."""
        found = super().fitted(fields)
        if found.get("squares"):
            plain = {"bias": False, "accumulate": False}
            found |= plain if found["out"] == "fp32" else {"squares": False}
        return found

    def floats(
        self, problem: GemmProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        a = source.floats(problem.m, problem.k, operand=0)
        return {"a": a, "b": source.floats(problem.n, problem.k, operand=1)}

    def updated(self, problem: GemmProblem) -> tuple[str, ...]:
        return ("c",) if problem.accumulate else ()

    def reference(self, problem: GemmProblem, inputs: Tensors) -> Tensors:
        expected = products.reference(inputs, problem.block)
        if problem.out == "int8":
            noise, over = (_of_written(problem, expected[k]) for k in ("evaluation", "over"))
            expected |= unrounded(problem, inputs, expected["c"], noise, over)
        return expected

    def check(
        self,
        problem: GemmProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: Tensor | None = None,
    ) -> Check:
        if problem.out != "int8":
            from jetfire.measure.check import every

            c = outputs["c"]
            found = products.check_floats(c, expected, noise, problem.block, problem.k)
            if not problem.squares:
                return found
            return every([found, products.check_squares(outputs["squares"], c)])
        over = products.overflowing(expected, noise)
        off = expected["evaluation"] if noise is None else expected["evaluation"] + noise
        known = {"q_noise": _of_written(problem, off), "q_over": _of_written(problem, over)}
        return super().check(problem, outputs, expected | known)

    def same_bits(self, problem: GemmProblem) -> SameBits:
        """Return "runs" with squares: they are sums."""
        return "runs" if problem.squares else "configs"

    def nothing(self, problem: GemmProblem, inputs: Tensors, outputs: Tensors) -> None:
        """Write the bias, or zeros, and what C held."""
        from jetfire.reference.quantize import quantize

        value = inputs.get("bias")
        if value is None:
            value = inputs["a_scale"].new_zeros(problem.n)
        value = value.expand(problem.m, problem.n)
        if problem.accumulate:
            outputs["c"] += value
        elif problem.out != "int8":
            outputs["c"].copy_(value)
            if problem.squares:
                outputs["squares"].zero_()
        elif value.numel():
            seed = inputs.get("seed")
            codes = with_transpose(*quantize(value, problem.out_block, problem.rounding, seed))
            for name, tensor in outputs.items():
                tensor.copy_(codes[name])

    def flops(self, problem: GemmProblem) -> float:
        return 2.0 * problem.m * problem.n * problem.k

    def edges(self, problem: GemmProblem, inputs: Tensors, rng: Random) -> Tensors:
        return products.edges_of(rng, inputs)

    def timed(self) -> list[Timed]:
        """Return 8192³ with each output, ragged, as wgrad; models, squares, few rows; schedules."""
        square, bf16 = {"m": [8192]}, ("cublas_bf16",)
        codes = {"out": ["int8"], "rounding": ["nearest", "stochastic"], "layout": ["q", "both"]}
        flow = {"out": ["int8"], "out_block": ["32"]}
        targets = partial(Timed, "targets", turn=2)
        ragged = {"m": [8191], "n": [8193], "k": [8200]}
        deep = {"m": [4096], "n": [4096], "k": [8192]}
        wgrad = partial(targets, sizes=deep, peers=bf16, kernels=SUITE_KERNELS)
        models = partial(
            Timed,
            "gemm",
            modes=("fwd", "bwd"),
            peers=("cublas_bf16", "fp8_scaled_mm_block"),
            rounds=6,
            kernels=SUITE_KERNELS,
        )
        few = partial(models, modes=("fwd",), blocks=("128",))
        promotion = partial(Timed, "promotion", sizes=square, peers=PROMOTION_PEERS, schedules=True)
        return [
            targets(sizes=square, power_ms=STEADY_MS),
            targets(sizes=square, settings=codes, peers=bf16, rounds=6),
            targets(sizes=square, settings={"out": ["fp16", "fp32"]}, peers=bf16, rounds=6),
            targets(sizes=ragged, peers=bf16, rounds=6, kernels=SUITE_KERNELS),
            wgrad(settings={"out": ["bf16"]}),
            wgrad(settings={"out": ["fp32"], "accumulate": ["true"]}),
            Timed("gemm", sizes={"m": [512, *workloads.SQUARES]}),
            *(models(workload=name) for name in workloads.MODELS),
            *(few(workload=name, settings=flow) for name in workloads.MODELS),
            *(few(sizes={"m": [64, 128, 4096], "n": [n], "k": [k]}) for n, k in DEEP),
            *(promotion(data=data) for data in OPERANDS),
        ]

    def exported(self) -> list[Exported]:
        square = {"m": 8192, "n": 8192, "k": 8192}
        return [Exported("wgmma", {**square, "block": b}, None, turn=0) for b in (128, 32)]

    def shipped(self, workload: str, mode: Mode) -> list[dict[str, Any]]:
        """Return a square's every output (backward is the same problem); else the float's and int8.

        Stochastic where int8 is a gradient.
        """
        if workload == "square":
            outs = ("bf16", "fp16", "fp32", "int8")
            return [{"out": out} for out in outs] if mode == "fwd" else []
        rounding = "stochastic" if mode == "bwd" else "nearest"
        return [{}, {"out": "int8", "rounding": rounding}]

    def kinds(self, fields: Mapping[str, Any]) -> list[Any]:
        outputs = {"out": "bf16"}, {"out": "int8"}, {"out": "fp32", "accumulate": True}
        return [self.Problem.parse({**fields, **output}) for output in outputs]

    def peers(self, problem: GemmProblem, inputs: Tensors) -> dict[str, Factory]:
        return peers.gemm(problem.m, problem.n, problem.k, inputs["a"].device)


def _of_written(problem: GemmProblem, bound: Tensor) -> Tensor:
    """Return a bound on the elements of C's blocks by the blocks of the codes that are written."""
    return reblocked(bound, problem.m, problem.n, problem.block, problem.out_block)


OP = Gemm()


def _keep_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if not ctx.needs_input_grad[4]:
        ctx.mark_non_differentiable(output)


def _bias_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    import torch

    dbias = grad.sum(0, dtype=torch.float32) if ctx.needs_input_grad[4] else None
    return None, None, None, None, dbias, None, None


_gemm = Differentiable(
    "gemm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int block, str"
    " out) -> Tensor",
    leaf=4,
    backward=_bias_gradient,
    setup=_keep_bias,
    derive=of_product,
)
_gemm_squares = Operator(
    "gemm_squares(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int block)"
    " -> (Tensor, Tensor)",
    derive=of_product,
    out="fp32",
    squares=True,
    op="gemm",
)
_gemm_quantized = Operator(
    "gemm_quantized(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias,"
    " Tensor? seed, int block, str rounding, str layout, int? out_block=None) -> Tensor[]",
    derive=of_product,
    out="int8",
    op="gemm",
)
_gemm_accumulate = Operator(
    "gemm_accumulate(Tensor(a!) c, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale,"
    " Tensor? bias, int block) -> ()",
    derive=of_product,
    dtype_field="out",
    accumulate=True,
    op="gemm",
)


@checked
def int8_gemm(
    a: Quantized,
    b: Quantized,
    *,
    out: str = "bf16",
    bias: Tensor | None = None,
    c: Tensor | None = None,
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
    out_block: Block | None = None,
    squares: bool = False,
) -> Any:
    """Return A·Bᵀ + bias of A (m×k) and B (n×k), quantised in equal blocks.

    Args:
        out: "bf16", "fp16", "fp32", or "int8" to requantise with `rounding`, `layout` and
            `out_block`.
        bias: fp32, n.
        c: m×n contiguous of dtype `out`: the product is added to it, in place. It shares no memory
            with another argument.
        out_block: the block of C's codes; None is that of A and B.
        squares: return Σx² of C's parts too. C is fp32, without bias and `c`.

    Returns:
        C, m×n; for int8, `Quantized`. With `squares`, C and fp32 ⌈m/16⌉×⌈n/32⌉, whose sum is the
        square of C's Frobenius norm.
    """
    (q, a_scale), (b_q, b_scale) = expect.quantized("a", a), expect.factors(b, a)
    m, n, block = q.shape[0], b_q.shape[0], a.block
    operands = (q, a_scale.contiguous(), b_q, b_scale.contiguous())
    if bias is not None:
        bias = expect.vector("bias", bias, n, q)
    if out != "int8":
        _expect_codes(
            out,
            rounding=(rounding, "nearest"),
            layout=(layout, "q"),
            out_block=(out_block or block, block),
        )
    if squares:
        for name, value, free in (("out", out, "fp32"), ("bias", bias, None), ("c", c, None)):
            if value is not free and value != free:
                raise UsageError(f"squares with {name}{shown(value)}: expected {name}={free}")
        return _gemm_squares(*operands, None, block)
    if c is not None:
        _accumulator(c, m, n, out, q)
        read = {"a_scale": a_scale, "b_scale": b_scale, "bias": bias}
        refuse_in_place({"c": c}, read, adds=True)
        _gemm_accumulate(c, *operands, bias, block)
        return c
    if out == "int8":
        seed = expect.rounding_seed(rounding, seed, layout, q)
        codes = _gemm_quantized(*operands, bias, seed, block, rounding, layout, out_block)
        return Quantized.of(codes, layout, out_block or block)
    expect.choice("out", out, FloatName, "int8")
    return _gemm(*operands, bias, block, out)


def _expect_codes(out: str, **given: tuple[Any, Any]) -> None:
    """Refuse what only codes have, where it is not as usual: name → (value, the usual one)."""
    for name, (value, usual) in given.items():
        if value != usual:
            raise UsageError(f"{name}={value} out={out}: expected out=int8")


def _accumulator(c: Tensor, m: int, n: int, out: Any, like: Tensor) -> None:
    if out not in get_args(FloatName):
        raise UsageError(f"c with out={out}: expected out=bf16 or fp16 or fp32")
    expect.matrix("c", c, (expect.named(dtype_of(out)),))
    expect.same_device("c", c, like)
    if c.shape != (m, n) or not c.is_contiguous():
        raise UsageError(f"c has shape {tuple(c.shape)}: expected {(m, n)}, contiguous")
