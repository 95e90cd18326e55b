"""Codes and scales back to floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import (
    Block,
    Check,
    FloatName,
    Op,
    Problem,
    SameBits,
    Tensors,
    float_dtype,
)
from jetfire.core.operators import Operator
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_dequantize"]


@dataclass(frozen=True)
class DequantizeProblem(Problem):
    """(q, scale) of an m×n tensor to x (m×n, `out`)."""

    block: Block = 32
    out: FloatName = "bf16"


class Dequantize(Op):
    name = "dequantize"
    summary = "per-block INT8 to float"
    Problem = DequantizeProblem

    def shapes(self, model: Model) -> list[dict[str, int]]:
        widths = (model.width, 3 * model.width, model.hidden)
        return [{"m": model.tokens, "n": width} for width in widths]

    def inputs(
        self, problem: DequantizeProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        q, scale = source.quantised(problem.m, problem.n, problem.block)
        return {"q": q, "scale": scale}

    def outputs(self, problem: DequantizeProblem, inputs: Tensors) -> Tensors:
        import torch

        shape, dtype = (problem.m, problem.n), float_dtype(problem.out)
        return {"x": torch.empty(shape, dtype=dtype, device=inputs["q"].device)}

    def reference(self, problem: DequantizeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.dequantize import dequantize

        dtype = float_dtype(problem.out)
        return {"x": dequantize(inputs["q"], inputs["scale"], problem.block, dtype)}

    def check(
        self,
        problem: DequantizeProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.exact("x", outputs["x"], expected["x"])

    def same_bits(self, problem: DequantizeProblem) -> SameBits:
        return "kernels"

    def peers(
        self, problem: DequantizeProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """The same product written in torch: BF16 training has no such pass to compare with."""
        import torch

        from jetfire.measure import peers

        q, scale, dtype = inputs["q"], inputs["scale"], float_dtype(problem.out)
        rows = torch.arange(problem.m, device=q.device) // problem.block
        cols = torch.arange(problem.n, device=q.device) // problem.block

        def eager() -> torch.Tensor:
            return (q.float() * scale[rows[:, None], cols[None, :]]).to(dtype)

        return peers.elementwise(eager, self.bytes(problem), q.device)


OP = Dequantize()

_dequantize = Operator(
    "dequantize(Tensor q, Tensor scale, int block, str out) -> Tensor",
)


@checked
def int8_dequantize(
    q: Tensor, scale: Tensor, *, block: Block = 32, out: FloatName = "bf16"
) -> Tensor:
    """q·scale as `out`, m×n."""
    expect.codes("q", q, scale, block)
    expect.choice("out", out, FloatName)
    return _dequantize(q, scale, block, out)
