"""A linear layer in 4 bits as a whole: quantise, multiply; split, sample, gather, multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from jetfire.core.op import SameBits
from jetfire.core.problem import Group, Mode, Problem
from jetfire.core.suites import Timed
from jetfire.core.tensors import Spec, Specs, Tensors, ceil_div, dtype_of
from jetfire.measure import peers
from jetfire.measure.data import Source
from jetfire.measure.int4 import even, first_step, step_gradient, whole_groups
from jetfire.measure.op import StandardOp
from jetfire.measure.peers import Factory


@dataclass(frozen=True)
class HadamardGemmProblem(Problem):
    """x (m×k) and w (n×k), `dtype`, through a linear layer of 4-bit codes; or its gradients.

    fwd: x and w with their steps (1,) to c (m×n, x·wᵀ), and to what is kept of x for backward: q
    (packed codes) and squares (m,), of their rows.

    bwd: g (m×n), what was kept of x with its scale, w with its scale and wt, its wide codes
    transposed (k×n: made once a step with the weight's codes), to dx (m×k), dw (n×k) and
    dstep_w (n,), the gradient of w's step by rows. g is split in two 4-bit parts, of whose 2m rows
    m are drawn for each product, by a seed each.
    """

    k: int
    group: Group = 32
    dtype: Literal["bf16", "fp16"] = "bf16"
    mode: Mode = "fwd"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_groups("k", self.k, self.group)
        if self.mode == "bwd":
            even("n", self.n)


class HadamardGemm(StandardOp):
    name = "hadamard_gemm"
    summary = "a linear layer in 4 bits, all stages: Hadamard, codes, product; sampled gradients"
    Problem = HadamardGemmProblem
    composite = True
    baselines = ("cublas_fp16",)  # the paper's (arXiv 2306.11987)
    dims = ("m", "n", "k")
    modes = ("fwd", "bwd")
    # tests/test_hadamard_gemm.py holds them to that.
    no_gradients = "of rows drawn at random, right in the mean alone"
    workload = "int4-paper"

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole groups of k; an even n, two codes per byte."""
        unit = max(2, fields["group"])
        sizes = {"n": ceil_div(fields["n"], 2) * 2, "k": ceil_div(fields["k"], unit) * unit}
        return {**fields, **sizes}

    def reads(self, problem: HadamardGemmProblem) -> Specs:
        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        one, seed = Spec("fp32", (1,)), Spec("int64", (1,))
        x, w = Spec(dtype, (m, k)), Spec(dtype, (n, k))
        if problem.mode == "fwd":
            return {"x": x, "w": w, "step_x": one, "step_w": one}
        return {
            "g": Spec(dtype, (m, n)),
            "q": Spec("int8", (m, k // 2)),
            "squares": Spec("int32", (m,)),
            "x_scale": one,
            "w": w,
            "w_scale": one,
            "wt": Spec("int8", (k, n)),
            "seed_split": seed,
            "seed_dgrad": seed,
            "seed_wgrad": seed,
        }

    def writes(self, problem: HadamardGemmProblem) -> Specs:
        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        if problem.mode == "bwd":
            dw = Spec(dtype, (n, k))
            return {"dx": Spec(dtype, (m, k)), "dw": dw, "dstep_w": Spec("fp32", (n,))}
        q = Spec("int8", (m, k // 2))
        return {"c": Spec(dtype, (m, n)), "q": q, "squares": Spec("int32", (m,))}

    def drawn(self, problem: HadamardGemmProblem, source: Source) -> Tensors:
        """Draw x, or backward's g, as the distribution's first operand, weights as its second."""
        from jetfire.reference.hadamard_quantize import quantize
        from jetfire.reference.nibbles import pack, widen

        m, n, k = problem.m, problem.n, problem.k
        dtype, group = problem.dtype, problem.group
        w = source.floats(n, k, operand=1, dtype=dtype)
        if problem.mode == "fwd":
            x = source.floats(m, k, dtype=dtype)
            steps = {"step_x": first_step(x, group), "step_w": first_step(w, group)}
            return {"x": x, "w": w, **steps}
        x = source.normal(m, k).to(dtype_of(dtype))
        x_codes, x_scale, squares = quantize(x, first_step(x, group), group)
        w_codes, w_scale, _ = quantize(w, first_step(w, group), group)
        return {
            "g": source.floats(m, n, dtype=dtype),
            "q": pack(x_codes),
            "squares": squares,
            "x_scale": x_scale,
            "w": w,
            "w_scale": w_scale,
            "wt": widen(w_codes).t().contiguous(),
            "seed_split": source.seed(),
            "seed_dgrad": source.seed(),
            "seed_wgrad": source.seed(),
        }

    def reference(self, problem: HadamardGemmProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import hadamard_gemm as reference

        i, group = inputs, problem.group
        if problem.mode == "fwd":
            return reference.forward(i["x"], i["w"], i["step_x"], i["step_w"], group)
        seeds = i["seed_split"], i["seed_dgrad"], i["seed_wgrad"]
        expected = reference.backward(
            i["g"], i["q"], i["squares"], i["x_scale"], i["w"], i["w_scale"], i["wt"], seeds, group
        )
        return expected | step_gradient(expected.pop("dstep_terms"), "dstep_w")

    def flops(self, problem: HadamardGemmProblem) -> float:
        """Return those of the product; backward of two, in each of which a row of two is kept."""
        products = 2 if problem.mode == "bwd" else 1
        return products * 2.0 * problem.m * problem.n * problem.k

    def edges(self, problem: HadamardGemmProblem, inputs: Tensors, rng: Random) -> Tensors:
        from jetfire.measure import edges

        return {
            name: edges.step(rng, inputs[name]) for name in ("step_x", "step_w") if name in inputs
        }

    def same_bits(self, problem: HadamardGemmProblem) -> SameBits:
        """Return "runs" backward: the step's gradient is a sum."""
        return "runs" if problem.mode == "bwd" else "kernels"

    def timed(self) -> list[Timed]:
        return [Timed("int4", 1, self.modes, workload="int4-paper", peers=self.baselines)]

    def peers(self, problem: HadamardGemmProblem, inputs: Tensors) -> dict[str, Factory]:
        """Return the product, or backward's two, as training without codes has them."""
        m, n, k, device = problem.m, problem.n, problem.k, inputs["w"].device
        if problem.mode == "fwd":
            return peers.int4_gemm(m, n, k, device)
        return peers.both(peers.int4_gemm(m, k, n, device), peers.int4_gemm(n, k, m, device))


OP = HadamardGemm()
