"""GELU and its gradient on quantised tensors, tanh (GPT-2's) and erf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    Rounding,
    Tensors,
    quantised_outputs,
)
from jetfire.core.errors import UsageError
from jetfire.core.inplace import refuse_in_place
from jetfire.core.operators import Operator
from jetfire.core.suites import Exported
from jetfire.measure.data import Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetfire.core.contract import Model

__all__ = ["int8_gelu", "int8_gelu_backward"]


Approximate = Literal["tanh", "erf"]


@dataclass(frozen=True)
class GeluProblem(Problem):
    """fwd: x (m×n) to gelu(x); bwd: x and dy to dx = dy·gelu'(x); all quantised per block.

    dx's codes may be written over dy's: kernels read all of a tile before they write any of it.
    """

    block: Block = 32
    mode: Mode = "fwd"
    approximate: Approximate = "tanh"
    rounding: Rounding = "nearest"
    layout: Layout = "q"


class Gelu(Op):
    name = "gelu"
    summary = "GELU and its gradient, INT8 in and out"
    Problem = GeluProblem
    modes: ClassVar[tuple[Mode, ...]] = ("fwd", "bwd")

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return [{"m": model.tokens, "n": model.hidden}]

    def inputs(
        self, problem: GeluProblem, device: torch.device, seed: int = 0, data: str = "normal"
    ) -> Tensors:
        source = Source(data, device, seed)
        x, x_scale = source.quantised(problem.m, problem.n, problem.block)
        inputs = {"x": x, "x_scale": x_scale}
        if problem.mode == "bwd":
            dy, dy_scale = source.quantised(problem.m, problem.n, problem.block)
            inputs |= {"dy": dy, "dy_scale": dy_scale}
        if problem.rounding == "stochastic":
            inputs["seed"] = source.seed()
        return inputs

    def outputs(self, problem: GeluProblem, inputs: Tensors) -> Tensors:
        device = inputs["x"].device
        return quantised_outputs(problem, device, problem.layout, problem.m, problem.n)

    def reference(self, problem: GeluProblem, inputs: Tensors) -> Tensors:
        from jetfire.reference import gelu
        from jetfire.reference.philox import uniform
        from jetfire.reference.quantize import scales

        x, x_scale = inputs["x"], inputs["x_scale"]
        block, approximate = problem.block, problem.approximate
        if problem.mode == "bwd":
            dy, dy_scale = inputs["dy"], inputs["dy_scale"]
            value = gelu.backward(x, x_scale, dy, dy_scale, block, approximate)
        else:
            value = gelu.forward(x, x_scale, block, approximate)
        expected = {"value": value, "scale": scales(value.float(), block)[0]}
        expected["noise"] = _noise(problem, inputs, value)
        if problem.rounding == "stochastic":
            expected["u"] = uniform(inputs["seed"], problem.m, problem.n)
        return expected

    def check(
        self,
        problem: GeluProblem,
        outputs: Tensors,
        expected: Tensors,
        noise: torch.Tensor | None = None,
    ) -> Check:
        from jetfire.measure import check

        return check.quantised(
            outputs, expected["value"], expected["scale"], problem.block, expected.get("u"),
            noise=expected["noise"],
        )  # fmt: skip

    def in_place(self, problem: GeluProblem, inputs: Tensors) -> dict[str, str]:
        """dx over dy, which must be contiguous as an output is."""
        backward = problem.mode == "bwd" and problem.layout == "both"
        return {"q": "dy"} if backward and inputs["dy"].is_contiguous() else {}

    def gradients(self, problem: GeluProblem, inputs: Tensors, outputs: Tensors) -> list[Gradient]:
        from torch.nn import functional

        from jetfire.measure import gradient

        x = gradient.values(inputs["x"], inputs["x_scale"], problem.block).requires_grad_()
        dy = gradient.values(inputs["dy"], inputs["dy_scale"], problem.block)
        approximate = "tanh" if problem.approximate == "tanh" else "none"
        (dx,) = gradient.of(functional.gelu(x, approximate=approximate), dy, x)
        return gradient.quantised(problem, outputs, dx, gradient.FP32 * dy.abs())

    def exported(self) -> list[Exported]:
        problem = {"m": 8192, "n": 4096, "block": 32}
        return [Exported("triton", problem, ("cubin",), turn=4)]

    def peers(
        self, problem: GeluProblem, inputs: Tensors
    ) -> dict[str, Callable[[], Callable[[], Any]]]:
        import torch
        from torch.nn import functional

        from jetfire.measure import peers

        wide = peers.widened(inputs, problem.block)
        approximate = "tanh" if problem.approximate == "tanh" else "none"
        x = wide("x")
        if problem.mode == "fwd":

            def eager() -> Any:
                return functional.gelu(x, approximate=approximate)

        else:
            dy = wide("dy")

            def eager() -> Any:
                return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)

        return peers.elementwise(eager, self.bytes(problem), x.device)


def _noise(problem: GeluProblem, inputs: Tensors, value: torch.Tensor) -> torch.Tensor:
    """What evaluation in fp32 may add to a value, by block.

    Where gelu' crosses 0 its two terms cancel, and what an exponential of y or our fit of Φ is off
    by, 2^-21·|y| and 2^-18 of it, is of either term. A Φ below 2^-100, or a derivative below 2^-76,
    may come as 0: 1/(1 + 2^127) does, times its argument of up to 2^50.
    """
    import torch

    from jetfire.reference.dequantize import dequantize
    from jetfire.reference.gelu import gate, slope_terms
    from jetfire.reference.quantize import block_amax

    block, approximate = problem.block, problem.approximate
    x = dequantize(inputs["x"], inputs["x_scale"], block, torch.float64)
    exponent = gate(x, approximate).clamp(min=1e-300).log().abs()
    relative = 2.0**-18 + 2.0**-21 * exponent
    if problem.mode == "fwd":
        noise = relative * value.abs() + 2.0**-100 * x.abs()
    else:
        dy = dequantize(inputs["dy"], inputs["dy_scale"], block, torch.float64)
        noise = dy.abs() * (relative * slope_terms(x, approximate) + 2.0**-76)
    return block_amax(noise, block).nan_to_num(0.0)


OP = Gelu()

_gelu = Operator(
    "gelu(Tensor x, Tensor x_scale, Tensor? seed, int block, str approximate, str rounding,"
    " str layout) -> Tensor[]",
    mode="fwd",
)
_gelu_backward = Operator(
    "gelu_backward(Tensor x, Tensor x_scale, Tensor dy, Tensor dy_scale, Tensor? seed, int"
    " block, str approximate, str rounding, str layout) -> Tensor[]",
    mode="bwd",
    op="gelu",
)
# `q` holds dy's codes, and then dx's.
_gelu_backward_inplace = Operator(
    "gelu_backward_inplace(Tensor x, Tensor x_scale, Tensor(a!) q, Tensor dy_scale,"
    " Tensor(b!) scale, Tensor(c!) qt, Tensor(d!) scale_t, Tensor? seed, int block, str"
    " approximate, str rounding) -> ()",
    renamed={"dy": "q"},
    mode="bwd",
    layout="both",
    op="gelu",
)


@checked
def int8_gelu(
    x: Tensor,
    x_scale: Tensor,
    *,
    block: Block = 32,
    approximate: Approximate = "tanh",
    rounding: Rounding = "nearest",
    seed: Tensor | None = None,
    layout: Layout = "q",
) -> tuple[Tensor, ...]:
    """gelu(x), quantised; `approximate` is "tanh" or "erf".

    Returns:
        As `layout` says: q, scale and/or qt, scale_t.
    """
    expect.codes("x", x, x_scale, block)
    expect.choice("approximate", approximate, Approximate)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    return tuple(_gelu(x, x_scale, seed, block, approximate, rounding, layout))


@checked
def int8_gelu_backward(
    x: Tensor,
    x_scale: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    *,
    block: Block = 32,
    approximate: Approximate = "tanh",
    rounding: Rounding = "stochastic",
    seed: Tensor | None = None,
    layout: Layout = "q",
    inplace: bool = False,
) -> tuple[Tensor, ...]:
    """dx = dy·gelu'(x), quantised; the rest as `int8_gelu`.

    Args:
        inplace: write dx's codes over dy's (contiguous, apart from x's); `layout` is then "both".
    """
    expect.codes("x", x, x_scale, block)
    expect.codes("dy", dy, dy_scale, block, like=x)
    expect.choice("approximate", approximate, Approximate)
    seed = expect.rounding_seed(rounding, seed, layout, x)
    if not inplace:
        return tuple(
            _gelu_backward(x, x_scale, dy, dy_scale, seed, block, approximate, rounding, layout)
        )
    if layout != "both" or not dy.is_contiguous():
        raise UsageError(
            f"inplace with layout={layout}, strides {dy.stride()}: expected "
            "layout=both and contiguous dy"
        )
    refuse_in_place({"dy": dy}, {"x": x})
    scale, qt = dy_scale.new_empty(dy_scale.shape), dy.new_empty(dy.shape[::-1])
    scale_t = scale.new_empty(scale.shape[::-1])
    _gelu_backward_inplace(
        x, x_scale, dy, dy_scale, scale, qt, scale_t, seed, block, approximate, rounding
    )
    return dy, scale, qt, scale_t
