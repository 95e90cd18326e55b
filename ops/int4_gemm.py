"""INT4 GEMM: a linear layer's forward and its gradients of sampled rows, all as one NT product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.kept_rows import MOST_K, SEGMENT, capacity
from jetfire.core.op import Tuning
from jetfire.core.operators import Operator, Shape
from jetfire.core.problem import Block, FloatName, Mode, Problem
from jetfire.core.suites import STEADY_MS, Exported, Timed
from jetfire.core.tensors import Quantized, Quantized4, Spec, Specs, Tensors, dtype_of, quantized
from jetfire.measure import peers
from jetfire.measure.data import Source
from jetfire.measure.op import StandardOp
from jetfire.measure.peers import Factory

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_gemm"]

Operands = Literal["packed", "wide"]
Product = Literal["fwd", "dgrad", "wgrad"]


@dataclass(frozen=True)
class Int4GemmProblem(Problem):
    """C (m×n) = s·A (m×k)·Bᵀ (B n×k), both K-contiguous, s = a_scale·b_scale.

    Operands are 4-bit codes, ``packed`` two per byte or ``wide``, one in a byte's high half
    (`reference.nibbles`), the sixteenth of which is meant. Products other than `fwd` read
    ``counts`` (2,) int32 on the device:

    ``dgrad``: row i is multiplied by ``weight`` (m,); only the first counts[1] rows are wanted,
    the rest of C may hold anything.
    ``wgrad``: the first counts[0] of K count 14 times, those from there to counts[1] once, the rest
    is not read. Counts are multiples of 128. A's codes may have been repeated, up to ±112, for
    which a nibble has no room: both operands' bytes are then the numbers that are meant.

    ``out="int8"``, of `fwd` alone: codes of C, rounded to nearest in blocks of `out_block`.
    """

    of_codes: ClassVar[tuple[str, ...]] = ("out_block",)
    k: int
    operands: Operands = "packed"
    product: Product = "fwd"
    out: Literal["bf16", "fp16", "fp32", "int8"] = "bf16"
    out_block: Block = 32
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k % 2:
            raise UsageError(f"k={self.k}: expected an even number, for wide codes too")
        if self.bias and self.product != "fwd":
            raise UsageError(f"bias=true product={self.product}: expected product=fwd")
        if self.out == "int8" and self.product != "fwd":
            raise UsageError(f"out=int8 product={self.product}: expected product=fwd")
        if self.out_block != 32 and self.out != "int8":
            raise UsageError(f"out_block={self.out_block} out={self.out}: expected out=int8")
        if self.operands == "packed" and self.product == "wgrad":
            raise UsageError(
                "operands=packed product=wgrad: expected operands=wide, whose bytes have room for "
                "repeated codes"
            )
        if self.k > (most := MOST_K[self.product]):
            raise UsageError(f"k={self.k}: expected at most {most} for sums in 32 bits")

    @property
    def shifted(self) -> bool:
        """Whether operands are wide codes, in the high halves of their bytes."""
        return self.operands == "wide" and self.product != "wgrad"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of A or B."""
        return self.k // 2 if self.operands == "packed" else self.k


def sampled(problem: Int4GemmProblem) -> tuple[int, int]:
    """Return the counts that `Int4Gemm.drawn` gives: rows of a dgrad, depth of a wgrad.

    As `sample_rows` has them of a split gradient, of whose kept rows about 60% are high ones. What
    it keeps for a dgrad, a multiple of 128, all but always fills its capacity; of a wgrad's a ninth
    is for rows that the least probability keeps. A dgrad of other sizes is an eighth short.
    """
    if problem.product == "wgrad":
        blocks = problem.k // SEGMENT
        end = (blocks - blocks // 9) * SEGMENT
    elif problem.product == "dgrad":
        end = problem.m - (problem.m // 8 if problem.m % SEGMENT else 0)
    else:
        raise ValueError("product=fwd has no counts")
    return min(end, round(0.6 * end / SEGMENT) * SEGMENT), end


class Int4Gemm(StandardOp):
    name = "int4_gemm"
    summary = "INT4 GEMM, C = s·A·Bᵀ with one scale per matrix; with sampled rows for gradients"
    Problem = Int4GemmProblem
    same_bits_over = "kernels"
    in_part = ("c",)  # a dgrad's rows
    dims = ("m", "n", "k")
    modes = ("fwd", "bwd")
    baselines = ("cublas_fp16",)  # the paper's (arXiv 2306.11987)
    tuning = Tuning(40, "cublas_fp16")
    matched = (*StandardOp.matched, "operands")
    sums: ClassVar[Mapping[str, tuple[str, ...]]] = {"k": ("c",)}
    no_gradients = "dgrad and wgrad are its own product, of rows drawn before"

    def problems(self, mode: Mode, fields: Mapping[str, Any]) -> list[Any]:
        """Return forward as it is; backward as dgrad and wgrad of half the gradient's split rows.

        Both multiply what was gathered, wide. wgrad's output is fp32 unless asked otherwise.
        """
        if mode not in self.modes:
            return super().problems(mode, fields)
        forward = self.Problem.parse(fields)
        if mode == "fwd":
            return [forward]
        if forward.product != "fwd":
            raise UsageError(f"mode=bwd product={forward.product}: expected the forward's problem")
        m, n, k = forward.m, forward.n, forward.k
        rows, depth = (capacity(m, 2, product, "half") for product in ("dgrad", "wgrad"))
        out = fields.get("out", "fp32")
        return [
            self.Problem(rows, k, n, operands="wide", product="dgrad", out=forward.out),
            self.Problem(n, k, depth, operands="wide", product="wgrad", out=out),
        ]

    def reads(self, problem: Int4GemmProblem) -> Specs:
        m, n, width = problem.m, problem.n, problem.row_bytes
        specs = {
            "a": Spec("int8", (m, width)),
            "a_scale": Spec("fp32", (1,)),
            "b": Spec("int8", (n, width)),
            "b_scale": Spec("fp32", (1,)),
        }
        if problem.bias:
            specs["bias"] = Spec("fp32", (n,))
        if problem.product != "fwd":
            specs["counts"] = Spec("int32", (2,))
        if problem.product == "dgrad":
            specs["weight"] = Spec("fp32", (m,))
        return specs

    def writes(self, problem: Int4GemmProblem) -> Specs:
        if problem.out == "int8":
            return quantized(problem.m, problem.n, problem.out_block)
        return {"c": Spec(problem.out, (problem.m, problem.n))}

    def drawn(self, problem: Int4GemmProblem, source: Source) -> Tensors:
        """Return codes of values of the distribution; where nothing may be read, random bytes."""
        inputs: Tensors = {}
        for i, (name, rows) in enumerate((("a", problem.m), ("b", problem.n))):
            codes, scale = _codes(source, problem, rows, i)
            inputs |= {name: codes, f"{name}_scale": scale}
        if problem.bias:
            inputs["bias"] = source.normal(problem.n)
        if problem.product != "fwd":
            _sample(source, problem, inputs)
        return inputs

    def reference(self, problem: Int4GemmProblem, inputs: Tensors) -> Tensors:
        """Return ``c`` or its codes, as every kernel must round; of a dgrad, the rows there are."""
        from jetfire.reference import int4_gemm as reference
        from jetfire.reference.nibbles import narrow, unpack
        from jetfire.reference.quantize import quantize

        a, b = inputs["a"], inputs["b"]
        if problem.operands == "packed":
            a, b = unpack(a), unpack(b)
        elif problem.shifted:
            a, b = narrow(a), narrow(b)
        operands = a, inputs["a_scale"], b, inputs["b_scale"]
        if problem.product == "dgrad":
            c = reference.dgrad(*operands, inputs["weight"], inputs["counts"])
        elif problem.product == "wgrad":
            c = reference.wgrad(*operands, inputs["counts"])
        else:
            c = reference.forward(*operands, inputs.get("bias"))
        if problem.out == "int8":
            return dict(zip(("q", "scale"), quantize(c, problem.out_block), strict=True))
        return {"c": c.to(dtype_of(problem.out))}

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        def operand(name: str) -> Quantized4:
            codes, scale = inputs[name], inputs[f"{name}_scale"]
            packed = fields["operands"] == "packed"
            return Quantized4(codes, None, scale) if packed else Quantized4(None, codes, scale)

        return {**super().arguments(fields, inputs), "a": operand("a"), "b": operand("b")}

    def nothing(self, problem: Int4GemmProblem, inputs: Tensors, outputs: Tensors) -> None:
        """Write the bias, or zeros."""
        from jetfire.reference.quantize import quantize

        value = inputs["bias"] if problem.bias else inputs["a_scale"].new_zeros(problem.n)
        value = value.expand(problem.m, problem.n)
        if problem.out != "int8":
            outputs["c"].copy_(value)
        elif value.numel():
            for name, codes in zip(outputs, quantize(value, problem.out_block), strict=True):
                outputs[name].copy_(codes)

    def flops(self, problem: Int4GemmProblem) -> float:
        """Return those of the rows or the depth that `sampled` says there are."""
        m, n, k = _counted(problem)
        return 2.0 * m * n * k

    def written(self, problem: Int4GemmProblem, inputs: Tensors, outputs: Tensors) -> Tensors:
        """Return of a dgrad the rows that there are."""
        if problem.product != "dgrad":
            return outputs
        return {"c": outputs["c"][: int(inputs["counts"][1])]}

    def edges(self, problem: Int4GemmProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Draw scales of any size; all rows wanted, one or none; of a depth a part, or none."""
        from jetfire.measure import edges

        scales = (0.0, 1.0, 2.0**-60, 2.0**60, math.nan)
        rare = {
            name: edges.throughout(rng, scales, inputs[name]) for name in ("a_scale", "b_scale")
        }
        if problem.bias:
            rare["bias"] = edges.each(rng, (0.0, 1.0, -1e4), inputs["bias"])
        if problem.product == "dgrad":
            end = rng.choice((0, 1, int(inputs["counts"][1])))
            rare["counts"] = edges.int64(rng.randint(0, end), end)
            rare["weight"] = edges.each(rng, (0.0, 1.0, 14.0, 2.0**20), inputs["weight"])
        elif problem.product == "wgrad":
            end = rng.randint(0, int(inputs["counts"][1]) // SEGMENT)
            high = rng.choice((0, end, rng.randint(0, end)))
            rare["counts"] = edges.int64(high * SEGMENT, end * SEGMENT)
        return rare

    def timed(self) -> list[Timed]:
        packed = {"operands": ["packed"]}
        return [Timed("int4", workload="int4-paper", settings=packed, power_ms=STEADY_MS)]

    def exported(self) -> list[Exported]:
        problem = {"m": 4608, "n": 5120, "k": 6144, "operands": "packed"}
        return [Exported("wgmma", problem, ("cuda",), turn=2)]

    def peers(self, problem: Int4GemmProblem, inputs: Tensors) -> dict[str, Factory]:
        """Return products as large as what is counted, without the sampling."""
        return peers.int4_gemm(*_counted(problem), inputs["a"].device)


def _counted(problem: Int4GemmProblem) -> tuple[int, int, int]:
    """Return m, n and k without the rows or the depth that are not read."""
    if problem.product == "dgrad":
        return sampled(problem)[1], problem.n, problem.k
    if problem.product == "wgrad":
        return problem.m, problem.n, sampled(problem)[1]
    return problem.m, problem.n, problem.k


def _codes(
    source: Source, problem: Int4GemmProblem, rows: int, operand: int
) -> tuple[Tensor, Tensor]:
    """Return codes and step (1,) of an operand, each value over 2·mean|x|/√7, rounded and clipped.

    NaN and ±Inf count as 0, and make of the step a NaN.
    """
    import torch

    from jetfire.reference.nibbles import pack, widen

    x = source.floats(rows, problem.k, operand=operand)
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    mean = finite.abs().mean(dtype=torch.float64)
    step = (2 / 7**0.5 * mean).clamp(min=2.0**-100).float().reshape(1)
    # A gradient's codes are symmetric, so that 16 times the least one fits too.
    least = -7 if operand == 0 and problem.product != "fwd" else -8
    q = (finite / step).round_().clamp_(least, 7).to(torch.int8)
    step[~x.isfinite().all()] = torch.nan
    if problem.operands == "packed":
        return pack(q), step
    return widen(q) if problem.shifted else q, step


def _sample(source: Source, problem: Int4GemmProblem, inputs: Tensors) -> None:
    """Draw counts; a dgrad's weights by row, a wgrad's repeats; bytes beyond the counts."""
    import torch

    a = inputs["a"]
    high, end = sampled(problem)
    inputs["counts"] = torch.tensor([high, end], dtype=torch.int32, device=source.device)
    if problem.product == "dgrad":
        weight = source.normal(problem.m).abs().exp_()
        weight[:high] *= 14
        weight[end:] = torch.nan
        inputs["weight"] = weight
        a[end:] = _bytes(source, *a[end:].shape) & (-16 if problem.shifted else -1)
        return
    # Most rows once or twice, one in a hundred 16 times: integers whose mean is 1/p.
    repeat = (1 + source.normal(problem.k).square_()).floor_().clamp_(max=16)
    repeat[source.integers(100, problem.k) == 0] = 16
    a *= repeat.to(torch.int8)
    for x in (a, inputs["b"]):
        x[:, end:] = _bytes(source, *x[:, end:].shape)


def _bytes(source: Source, *shape: int) -> Tensor:
    import torch

    return (source.integers(256, *shape) - 128).to(torch.int8)


OP = Int4Gemm()


def _sizes(
    a: Shape,
    b: Shape,
    bias: Shape | None,
    weight: Shape | None,
    counts: Shape | None,
    operands: str,
) -> dict[str, Any]:
    """Return fields: counts and a weight per row are for an input's gradient, counts alone for a
    weight's.
    """
    k = a[1] * (2 if operands == "packed" else 1)
    product = "fwd" if counts is None else "wgrad" if weight is None else "dgrad"
    return {"m": a[0], "n": b[0], "k": k, "product": product, "bias": bias is not None}


def _sizes_of_codes(a: Shape, b: Shape, bias: Shape | None, operands: str) -> dict[str, Any]:
    return _sizes(a, b, bias, None, None, operands)


_int4_gemm = Operator(
    "int4_gemm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, Tensor?"
    " weight, Tensor? counts, str operands, str out) -> Tensor",
    derive=_sizes,
)
_int4_gemm_quantized = Operator(
    "int4_gemm_quantized(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, str"
    " operands, int out_block) -> Tensor[]",
    derive=_sizes_of_codes,
    out="int8",
    op="int4_gemm",
)


@checked
def int4_gemm(
    a: Quantized4,
    b: Quantized4,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    counts: Tensor | None = None,
    out: str = "bf16",
    out_block: Block = 32,
) -> Any:
    """Return A (m×k)·Bᵀ (B n×k) + bias, m×n: of wide codes if both have them, else packed.

    Args:
        a, b: k is even, of wide codes too. For a weight's gradient wide codes are bytes that are
            the numbers meant (`int4_gather_rows` without `wide`).
        bias: fp32, n.
        weight, counts: of `int4_sample_rows`, for an input's gradient: row i is multiplied by
            weight[i], and what rows from counts[1] on hold is not said.
        counts alone: for a weight's gradient: what is summed over are the first counts[1], of
            which the first counts[0] count 14 times.
        out: "bf16", "fp16", "fp32"; or "int8", without counts, for codes in blocks of `out_block`.

    Returns:
        C, m×n; for int8, `Quantized`.
    """
    operands: Operands = "packed" if a.wide is None or b.wide is None else "wide"
    a_codes, b_codes = (a.packed, b.packed) if operands == "packed" else (a.wide, b.wide)
    if a_codes is None or b_codes is None:
        raise UsageError("a and b: expected packed codes of both, or wide codes of both")
    for name, codes, scale in (("a", a_codes, a.scale), ("b", b_codes, b.scale)):
        expect.matrix(name, codes, ("int8",))
        expect.same_device(name, codes, a_codes)
        expect.scalar(f"{name}'s scale", scale, a_codes)
    if a_codes.shape[1] != b_codes.shape[1]:
        unit = 2 if operands == "packed" else 1
        depths = f"a has k={a_codes.shape[1] * unit} and b k={b_codes.shape[1] * unit}"
        raise UsageError(f"{depths}: expected one k")
    expect.choice("out", out, FloatName, "int8")
    if out == "int8" and counts is not None:
        raise UsageError("out=int8: expected no counts with it")
    if out_block != 32 and out != "int8":
        raise UsageError(f"out_block={out_block} out={out}: expected out=int8")
    if bias is not None:
        bias = expect.vector("bias", bias, b_codes.shape[0], a_codes)
    if weight is not None:
        if counts is None:
            raise UsageError("weight: expected counts with it")
        weight = expect.vector("weight", weight, a_codes.shape[0], a_codes)
    if counts is not None:
        counts = expect.exactly("counts", counts, "int32", (2,), a_codes)
    a_scale, b_scale = a.scale.view(1), b.scale.view(1)
    factors = a_codes, a_scale, b_codes, b_scale, bias
    if out == "int8":
        return Quantized.of(_int4_gemm_quantized(*factors, operands, out_block), "q", out_block)
    return _int4_gemm(*factors, weight, counts, operands, out)
