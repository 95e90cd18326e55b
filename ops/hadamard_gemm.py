"""A linear layer in 4 bits as a whole: quantise, multiply; split, sample, gather, multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core.contract import Check, Mode, Op, Problem, SameBits, Tensors, ceil_div, float_dtype
from jetfire.core.errors import UsageError
from jetfire.core.suites import Timed
from jetfire.measure.data import Source
from jetfire.ops.hadamard_quantize import (
    Group,
    HadamardQuantizeProblem,
    dstep_bound,
    first_step,
)

if TYPE_CHECKING:
    from random import Random

    import torch

    from jetfire.core.contract import Model


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
        if self.k % self.group or self.k % 2:
            try:
                HadamardQuantizeProblem(1, self.k, group=self.group)
            except UsageError as error:
                raise UsageError(str(error).replace("n=", "k=")) from None
        if self.mode == "bwd" and self.n % 2:
            raise UsageError(f"n={self.n}: expected an even number, of two codes a byte")


class HadamardGemm(Op):
    name = "hadamard_gemm"
    summary = "a linear layer in 4 bits, all stages: Hadamard, codes, product; sampled gradients"
    Problem = HadamardGemmProblem
    composite = True
    baselines = ("cublas_fp16",)  # the paper's (arXiv 2306.11987)
    dims: ClassVar[tuple[str, ...]] = ("m", "n", "k")
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")
    # tests/test_hadamard_gemm.py holds them to that.
    no_gradients: ClassVar[str | None] = "of rows drawn at random, right in the mean alone"
    workload: ClassVar[str | None] = "int4-paper"

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": out, "k": inp} for out, inp in model.linears()]

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Whole groups of k; two codes a byte of n."""
        unit = max(2, fields["group"])
        sizes = {"n": ceil_div(fields["n"], 2) * 2, "k": ceil_div(fields["k"], unit) * unit}
        return {**fields, **sizes}

    def inputs(
        self, problem: HadamardGemmProblem, device: torch.device, seed: int = 0,
        data: str = "normal",
    ) -> Tensors:  # fmt: skip
        """The distribution's first operand is x, or backward's g; weights are the second."""
        source, dtype = Source(data, device, seed), problem.dtype
        m, n, k, group = problem.m, problem.n, problem.k, problem.group
        w = source.floats(n, k, operand=1, dtype=dtype)
        if problem.mode == "fwd":
            x = source.floats(m, k, dtype=dtype)
            steps = {"step_x": first_step(x, group), "step_w": first_step(w, group)}
            return {"x": x, "w": w, **steps}
        x = source.normal(m, k).to(float_dtype(dtype))
        q, squares, x_scale = _codes(x, group, packed=True)
        w_codes, _, w_scale = _codes(w, group, packed=False)
        return {
            "g": source.floats(m, n, dtype=dtype), "q": q, "squares": squares, "x_scale": x_scale,
            "w": w, "w_scale": w_scale, "wt": w_codes.t().contiguous(),
            "seed_split": source.seed(), "seed_dgrad": source.seed(), "seed_wgrad": source.seed(),
        }  # fmt: skip

    def outputs(self, problem: HadamardGemmProblem, inputs: Tensors) -> Tensors:
        import torch

        m, n, k = problem.m, problem.n, problem.k
        dtype, device = float_dtype(problem.dtype), inputs["w"].device

        def empty(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        if problem.mode == "bwd":
            dstep = empty(torch.float32, n)
            return {"dx": empty(dtype, m, k), "dw": empty(dtype, n, k), "dstep_w": dstep}
        q, squares = empty(torch.int8, m, k // 2), empty(torch.int32, m)
        return {"c": empty(dtype, m, n), "q": q, "squares": squares}

    def reference(self, problem: HadamardGemmProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import hadamard_gemm as reference

        i, group = inputs, problem.group
        if problem.mode == "fwd":
            return reference.forward(i["x"], i["w"], i["step_x"], i["step_w"], group)
        seeds = i["seed_split"], i["seed_dgrad"], i["seed_wgrad"]
        expected = reference.backward(
            i["g"], i["q"], i["squares"], i["x_scale"], i["w"], i["w_scale"], i["wt"], seeds, group
        )
        terms = expected.pop("dstep_terms")
        return expected | {"dstep_w": terms.sum(dim=1), **dstep_bound(terms)}

    def check(
        self,
        problem: HadamardGemmProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        """Equal bits, but for the step's gradient, which may be summed in any order."""
        from jetfire.measure import check

        found = [check.exact(k, out, expected[k]) for k, out in outputs.items() if k != "dstep_w"]
        if "dstep_w" in outputs:
            dstep, bound, over = (expected[k] for k in ("dstep_w", "dstep_bound", "dstep_over"))
            found.append(check.bounded("dstep_w", outputs["dstep_w"], dstep, bound, over))
        return check.every(found)

    def flops(self, problem: HadamardGemmProblem) -> float:
        """Of the product; backward of two, in each of which a row of two parts is kept once."""
        products = 2 if problem.mode == "bwd" else 1
        return products * 2.0 * problem.m * problem.n * problem.k

    def edges(self, problem: HadamardGemmProblem, inputs: Tensors, rng: Random) -> Tensors:
        from jetfire.measure import edges

        return {
            name: edges.step(rng, inputs[name]) for name in ("step_x", "step_w") if name in inputs
        }

    def same_bits(self, problem: HadamardGemmProblem) -> SameBits:
        """The step's gradient is a sum."""
        return "runs" if problem.mode == "bwd" else "kernels"

    def timed(self) -> list[Timed]:
        return [Timed("int4", 1, self.modes, workload="int4-paper", peers=self.baselines)]

    def peers(
        self, problem: HadamardGemmProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The product, or backward's two, as training without codes has them."""
        from jetfire.measure import peers

        m, n, k, device = problem.m, problem.n, problem.k, inputs["w"].device
        if problem.mode == "fwd":
            return peers.int4_gemm(m, n, k, device)
        return peers.both(peers.int4_gemm(m, k, n, device), peers.int4_gemm(n, k, m, device))


def _codes(
    x: torch.Tensor, group: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes at LSQ's first step, Σ codes² of each row, and their scale."""
    import torch

    from jetfire.reference.hadamard_quantize import quantize
    from jetfire.reference.nibbles import pack, widen

    step = first_step(x, group)
    if x.device.type == "meta":
        columns = x.shape[1] // 2 if packed else x.shape[1]
        codes = torch.empty((x.shape[0], columns), dtype=torch.int8, device=x.device)
        return codes, torch.empty(x.shape[0], dtype=torch.int32, device=x.device), step
    codes, scale, squares = quantize(x, step, group)
    return pack(codes) if packed else widen(codes), squares, scale


OP = HadamardGemm()
