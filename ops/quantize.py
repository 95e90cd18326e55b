"""Per-block quantisation to INT8: codes, their transpose, or both in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.ops.data import Source
from jetfire.ops.op import (
    Block,
    Check,
    FloatName,
    Layout,
    Op,
    Rounding,
    Tensors,
    float_dtype,
    quantised_outputs,
)
from jetfire.ops.op import Problem as BaseProblem

if TYPE_CHECKING:
    import torch

    from jetfire.ops.workloads import Model


@dataclass(frozen=True)
class Problem(BaseProblem):
    """x (m×n, `dtype`) to codes and scales in the given layout."""

    block: Block = 32
    dtype: FloatName = "bf16"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Quantize(Op):
    name = "quantize"
    summary = "float to per-block INT8, nearest or stochastic"
    Problem = Problem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = (model.width, 3 * model.width, model.hidden)
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: Problem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        inputs = {"x": source.floats(problem.m, problem.n).to(float_dtype(problem.dtype))}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: Problem, inputs: Tensors) -> Tensors:
        device = inputs["x"].device
        return quantised_outputs(problem, device, problem.layout, problem.m, problem.n)

    def reference(self, problem: Problem, inputs: Tensors) -> Tensors:
        from jetfire.reference.quantize import quantize, transpose

        q, scale = quantize(inputs["x"], problem.block, problem.rounding, inputs.get("seed"))
        qt, scale_t = transpose(q, scale)
        return {"q": q, "scale": scale, "qt": qt, "scale_t": scale_t}

    def check(self, problem: Problem, outputs: Tensors, expected: Tensors) -> Check:
        from jetfire.ops import check

        return check.every(
            [check.exact(name, out, expected[name]) for name, out in outputs.items()]
        )

    def peers(
        self, problem: Problem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        from jetfire.ops import peers
        from jetfire.reference.quantize import quantize

        x = inputs["x"]

        def nearest() -> Any:
            return quantize(x, problem.block)

        return peers.elementwise(nearest, self.bytes(problem), x.device)


OP = Quantize()
