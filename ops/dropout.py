"""Dropout of a quantised tensor, forward and backward; the mask is redrawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.contract import (
    Block,
    Check,
    Gradient,
    Layout,
    Mode,
    Op,
    Problem,
    SameBits,
    Tensors,
    quantised_outputs,
)
from jetfire.core.errors import UsageError
from jetfire.core.operators import Operator
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_dropout", "int8_dropout_backward"]


@dataclass(frozen=True)
class DropoutProblem(Problem):
    """(q, scale) of an m×n tensor, dropped with probability `p`, in the given layout.

    Backward is the same map on the gradient: one seed gives both the same mask.
    """

    block: Block = 32
    mode: Mode = "fwd"
    p: float = 0.1
    layout: Layout = "q"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p < 1:
            raise UsageError(f"p={self.p}: expected a probability in [0, 1)")


class Dropout(Op):
    name = "dropout"
    summary = "dropout of per-block INT8, exact: zeroes codes and rescales blocks"
    Problem = DropoutProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.width}]

    def inputs(
        self, problem: DropoutProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        q, scale = source.quantised(problem.m, problem.n, problem.block)
        return {"q": q, "scale": scale, "seed": source.seed()}

    def outputs(self, problem: DropoutProblem, inputs: Tensors) -> Tensors:
        device = inputs["q"].device
        return quantised_outputs(problem, device, problem.layout, problem.m, problem.n)

    def reference(self, problem: DropoutProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.dropout import dropout
        from jetfire.reference.transpose import transpose

        q, scale = dropout(inputs["q"], inputs["scale"], problem.p, inputs["seed"])
        qt, scale_t = transpose(q, scale)
        return {"q": q, "scale": scale, "qt": qt, "scale_t": scale_t}

    def check(
        self,
        problem: DropoutProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.every(
            [check.exact(name, out, expected[name]) for name, out in outputs.items()]
        )

    def gradients(
        self, problem: DropoutProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        """What the forward drops of ones is what it drops, by the seed and the threshold of p."""
        import torch

        from jetfire.measure import gradient
        from jetfire.reference.dropout import drop_threshold, dropout

        dy = gradient.values(inputs["q"], inputs["scale"], problem.block)
        ones = torch.ones_like(inputs["q"])
        kept = dropout(ones, inputs["scale"], problem.p, inputs["seed"])[0].double()
        x = torch.zeros_like(dy, requires_grad=True)
        (dx,) = gradient.of(x * kept / (1 - drop_threshold(problem.p) / 65536), dy, x)
        allowed = gradient.FP32 * dx.abs() + 2.0**-140
        found = []
        if "q" in outputs:
            got = gradient.values(outputs["q"], outputs["scale"], problem.block)
            found.append(Gradient("q", got, dx, allowed))
        if "qt" in outputs:
            got = gradient.values(outputs["qt"], outputs["scale_t"], problem.block).t()
            found.append(Gradient("qt", got, dx, allowed))
        return found

    def same_bits(self, problem: DropoutProblem) -> SameBits:
        return "kernels"

    def peers(
        self, problem: DropoutProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        """BF16: torch's dropout forward; backward its gradient, from the mask that it stored."""
        import torch

        from jetfire.measure import peers

        x = inputs["q"].to(torch.bfloat16)

        def forward() -> torch.Tensor:
            return torch.nn.functional.dropout(x, problem.p)

        if problem.mode == "fwd":
            return peers.elementwise(forward, self.bytes(problem), x.device)
        mask = torch.rand(x.shape, dtype=torch.float32, device=x.device) >= problem.p

        def backward() -> torch.Tensor:
            return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - problem.p))

        return peers.elementwise(backward, self.bytes(problem), x.device)


OP = Dropout()

_dropout = Operator(
    "dropout(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout) -> Tensor[]",
    mode="fwd",
)
_dropout_backward = Operator(
    "dropout_backward(Tensor q, Tensor scale, Tensor seed, float p, int block, str layout)"
    " -> Tensor[]",
    mode="bwd",
    op="dropout",
)


def _droppable(q: Tensor, scale: Tensor, seed: Tensor, block: Block, layout: Layout) -> None:
    expect.codes("q", q, scale, block)
    expect.seed_on(seed, q)
    expect.choice("layout", layout, Layout)


@checked
def int8_dropout(
    q: Tensor,
    scale: Tensor,
    seed: Tensor,
    *,
    p: float = 0.1,
    block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """Codes zeroed with probability p and scales divided by 1 − p; nothing is requantised.

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    _droppable(q, scale, seed, block, layout)
    return tuple(_dropout(q, scale, seed, p, block, layout))


@checked
def int8_dropout_backward(
    q: Tensor,
    scale: Tensor,
    seed: Tensor,
    *,
    p: float = 0.1,
    block: Block = 32,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """The gradient of `int8_dropout` with the same seed, from its output's gradient."""
    _droppable(q, scale, seed, block, layout)
    return tuple(_dropout_backward(q, scale, seed, p, block, layout))
