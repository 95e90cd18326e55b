"""Softmax of each row and its gradient: one op, and a Triton kernel for both.

jetfire bench row_softmax --load row_softmax.py --m 8192 --n 4096 --mode fwd,bwd
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton
import triton.language as tl

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.op import Gradient
from jetfire.core.operators import Differentiable, Operator
from jetfire.core.problem import FloatName, Mode, Problem
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.kernels_triton.common import to_float
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import device_reason
from jetfire.measure import bounds, gradient
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_softmax", "row_softmax_backward"]


@dataclass(frozen=True)
class RowSoftmaxProblem(Problem):
    """fwd: x (m×n) to y, the softmax of each row; bwd: x and dy to dx."""

    dtype: FloatName = "bf16"
    mode: Mode = "fwd"


class RowSoftmax(StandardOp):
    name = "row_softmax"
    summary = "softmax of each row and its gradient"
    Problem = RowSoftmaxProblem
    modes = ("fwd", "bwd")
    same_bits_over = "runs"  # in which order a row is summed depends on the warps

    def reads(self, problem: RowSoftmaxProblem) -> Specs:
        matrix = Spec(problem.dtype, (problem.m, problem.n))
        return {"x": matrix} if problem.mode == "fwd" else {"x": matrix, "dy": matrix}

    def writes(self, problem: RowSoftmaxProblem) -> Specs:
        return {"y": Spec(problem.dtype, (problem.m, problem.n))}

    def reference(self, problem: RowSoftmaxProblem, inputs: Tensors) -> Tensors:
        """Return y, or dx = y·(dy − Σ dy·y), in float64 with the error that fp32 may make."""
        x = inputs["x"].double()
        e = (x - x.amax(dim=1, keepdim=True)).exp()
        y = e / e.sum(dim=1, keepdim=True)
        if problem.mode == "fwd":
            return bounds.of_float("y", y, problem.dtype, 2e-5 * y)
        dy = inputs["dy"].double()
        dx = y * (dy - (dy * y).sum(dim=1, keepdim=True))
        size = dy.abs() + (dy * y).abs().sum(dim=1, keepdim=True)
        return bounds.of_float("y", dx, problem.dtype, 5e-5 * y * size, size >= bounds.OVER)

    def gradients(
        self, problem: RowSoftmaxProblem, inputs: Tensors, outputs: Tensors
    ) -> list[Gradient]:
        x, dy = inputs["x"].double().requires_grad_(), inputs["dy"].double()
        y = torch.softmax(x, dim=1)
        (dx,) = gradient.of(y, dy, x)
        size = dy.abs() + (dy * y).abs().sum(dim=1, keepdim=True)
        allowed = gradient.HALF[problem.dtype] * dx.abs() + 5e-5 * y.detach() * size
        return [Gradient("y", outputs["y"], dx, allowed + gradient.LEAST)]

    def eager(self, problem: RowSoftmaxProblem, inputs: Tensors) -> Callable[[], Any]:
        if problem.mode == "fwd":
            return lambda: torch.softmax(inputs["x"], dim=1)
        y, dy = torch.softmax(inputs["x"], dim=1), inputs["dy"]
        return lambda: torch.ops.aten._softmax_backward_data(dy, y, 1, y.dtype)


OP = RowSoftmax()


@triton.jit
def row_softmax_kernel(
    x_ptr,
    dy_ptr,
    y_ptr,
    N,
    x_stride,
    dy_stride,
    y_stride,
    TILE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < N
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    if BACKWARD:
        dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        y = y * (dy - tl.sum(dy * y, axis=0))
    tl.store(y_ptr + row * y_stride + columns, to_float(y, y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class RowSoftmaxConfig(Config):
    warps: int = 4


class TritonRowSoftmax(TritonKernel):
    op = "row_softmax"
    Config = RowSoftmaxConfig
    choices: ClassVar = {"warps": (1, 2, 4, 8, 16)}

    def legal(
        self, problem: RowSoftmaxProblem, config: RowSoftmaxConfig, device: Device
    ) -> str | None:
        if problem.n > 2**15:
            return f"n={problem.n}: expected at most 32768, as a program holds a row"
        return device_reason(device) or self.outside(config)

    def default(self, problem: RowSoftmaxProblem, device: Device) -> RowSoftmaxConfig:
        return RowSoftmaxConfig()

    def launches(
        self, problem: RowSoftmaxProblem, config: RowSoftmaxConfig, device: Device
    ) -> tuple[Launch, ...]:
        """Return one program per row. `TILE` is given; the names of the rest say what they get."""
        tile = triton.next_power_of_2(problem.n)
        return (Launch(row_softmax_kernel, (problem.m,), problem, config, TILE=tile),)


KERNELS = (TritonRowSoftmax(),)


# --- what a model calls, and torch.ops.jetfire has ----------------------------------------------


@checked
def row_softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row of x (m×n bf16, fp16 or fp32), with a gradient."""
    expect.matrix("x", x, expect.FLOATS)
    return _row_softmax(x)


@checked
def row_softmax_backward(x: Tensor, dy: Tensor) -> Tensor:
    """Return dx of `row_softmax`, from its input and its output's gradient."""
    expect.matrix("x", x, expect.FLOATS)
    return _row_softmax_backward(x, dy.contiguous())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return row_softmax_backward(x, dy)


_row_softmax_backward = Operator(
    "row_softmax_backward(Tensor x, Tensor dy) -> Tensor", dtype_field="dtype"
)
_row_softmax = Differentiable(
    "row_softmax(Tensor x) -> Tensor",
    leaf=0,
    backward=_gradient,
    setup=_keep,
    dtype_field="dtype",
)
