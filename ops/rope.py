"""Rotary position embeddings of a matrix of heads, and back: queries and keys of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.op import Model
from jetfire.core.operators import Differentiable, Operator, Shape
from jetfire.core.problem import FloatName, Problem
from jetfire.core.tensors import Spec, Specs, Tensors, ceil_div
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor

__all__ = ["rotary_embedding"]


@dataclass(frozen=True)
class RopeProblem(Problem):
    """x (m×n·head, `dtype`), n heads beside one another, turned by cos and sin (fp32, m×head/2).

    Column i of a head's first half and column i of its second half are a pair, which is turned by
    the row's angle i. `inverse` turns back.
    """

    head: int = 64
    inverse: bool = False
    dtype: FloatName = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head % 2:
            raise UsageError(f"head={self.head}: expected an even number")

    @property
    def width(self) -> int:
        """Columns of x."""
        return self.n * self.head


class Rope(StandardOp):
    name = "rope"
    summary = "rotary position embeddings of queries and keys, and back"
    Problem = RopeProblem
    same_bits_over = "kernels"
    matched = (*StandardOp.matched, "head")
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        """Return the heads of queries and keys side by side."""
        return [{"m": model.tokens, "n": 2 * model.width // 64}]

    def fitted(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return an even head, and of large ones a few: sizes are drawn alike."""
        head = min(256, max(2, fields["head"] - fields["head"] % 2))
        return {**fields, "head": head, "n": ceil_div(fields["n"], head)}

    def reads(self, problem: RopeProblem) -> Specs:
        angles = Spec("fp32", (problem.m, problem.head // 2))
        x = Spec(problem.dtype, (problem.m, problem.width))
        return {"x": x, "cos": angles, "sin": angles}

    def edges(self, problem: RopeProblem, inputs: Tensors, rng: Random) -> Tensors:
        """Return angles of 0 and of quarters of a turn, of some tokens."""
        from jetfire.measure import edges

        return {name: edges.each(rng, (0.0, 1.0, -1.0), inputs[name]) for name in ("cos", "sin")}

    def in_place(self, problem: RopeProblem, inputs: Tensors) -> dict[str, str]:
        """Return y over x, whose pairs a program reads before it writes them."""
        return {"y": "x"}

    def writes(self, problem: RopeProblem) -> Specs:
        return {"y": Spec(problem.dtype, (problem.m, problem.width))}

    def reference(self, problem: RopeProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference.rope import rope

        return {"y": rope(inputs["x"], inputs["cos"], inputs["sin"], problem.inverse)}

    def eager(self, problem: RopeProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the same as models write it: x·cos + rotate_half(x)·sin, in x's dtype."""
        import torch

        x = inputs["x"].unflatten(1, (-1, problem.head))
        turn = -1 if problem.inverse else 1
        cos, sin = (
            torch.cat([table, table], dim=1)[:, None].to(x.dtype)
            for table in (inputs["cos"], turn * inputs["sin"])
        )

        def turned() -> Tensor:
            first, second = x.chunk(2, dim=2)
            return (x * cos + torch.cat([-second, first], dim=2) * sin).flatten(1)

        return turned


OP = Rope()


def _sizes(x: Shape, cos: Shape) -> dict[str, Any]:
    return {"m": x[0], "n": x[1] // (2 * cos[1]), "head": 2 * cos[1]}


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    return _rope(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope = Differentiable(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    leaf=0,
    backward=_turn_back,
    setup=_keep_angles,
    derive=_sizes,
    dtype_field="dtype",
)


# `y` holds x, and then what it is turned to.
_rope_inplace = Operator(
    "rope_inplace(Tensor(a!) y, Tensor cos, Tensor sin, bool inverse) -> ()",
    op="rope",
    derive=lambda y, cos: _sizes(y, cos),
    dtype_field="dtype",
    renamed={"x": "y"},
)


@checked
def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, inplace: bool = False
) -> Tensor:
    """Return x with each pair (i, i + head/2) of every head turned by its row's angle i.

    Rotary position embeddings (arXiv 2104.09864, section 3.2), paired as in `transformers`. The
    gradient is that of x; angles have none.

    Args:
        x: m×n bf16, fp16 or fp32, heads beside one another.
        cos, sin: of the angles, fp32, m×head/2.
        inverse: whether to turn back.
        inplace: overwrite x, which has no gradient, and return it.
    """
    expect.matrix("x", x, expect.FLOATS)
    for name, table in (("cos", cos), ("sin", sin)):
        expect.matrix(name, table, ("float32",))
        expect.same_device(name, table, x)
        if table.shape[0] != x.shape[0] or table.shape != cos.shape:
            raise UsageError(
                f"{name} has shape {tuple(table.shape)}: expected {x.shape[0]} rows, as x has, "
                "of cos and sin alike"
            )
    head = 2 * cos.shape[1]
    if not head or x.shape[1] % head:
        raise UsageError(f"x has {x.shape[1]} columns: expected whole heads of {head}, as cos says")
    if not inplace:
        return _rope(x, cos, sin, inverse)
    refuse_in_place({"x": x}, {"cos": cos, "sin": sin})
    _rope_inplace(x, cos, sin, inverse)
    return x
