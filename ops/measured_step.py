"""The step of a 4-bit quantiser, measured on some rows of the matrix that it rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.op import Model
from jetfire.core.operators import Operator
from jetfire.core.problem import Block, Problem
from jetfire.core.tensors import Quantized, Spec, Specs, Tensors, dtype_of, quantized
from jetfire.measure.bounds import OVER, higham
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["int4_measured_step"]

# Sums of at most so many neighbours are added one after another, and then in a tree.
LEAST_TILE = 256


@dataclass(frozen=True)
class MeasuredStepProblem(Problem):
    """x (m×n of `dtype`) to a step (1,): a share of its root mean square (`reference`).

    int8 are codes with x_scale, in blocks of `block`. Some 512 of the rows are read.
    """

    dtype: Literal["bf16", "fp16", "fp32", "int8"] = "int8"
    block: Block = 32


class MeasuredStep(StandardOp):
    name = "measured_step"
    summary = "the step of a 4-bit quantiser, a share of the root mean square of some rows"
    Problem = MeasuredStepProblem
    same_bits_over = "runs"
    untuned = True

    def shapes(self, model: Model) -> list[dict[str, int]]:
        return model.operands()

    def reads(self, problem: MeasuredStepProblem) -> Specs:
        m, n = problem.m, problem.n
        if problem.dtype == "int8":
            return quantized(m, n, problem.block, "x")
        return {"x": Spec(problem.dtype, (m, n))}

    def writes(self, problem: MeasuredStepProblem) -> Specs:
        return {"step": Spec("fp32", (1,))}

    def arguments(self, fields: Mapping[str, Any], inputs: Tensors) -> dict[str, Any]:
        x, scale = inputs["x"], inputs.get("x_scale")
        return {"x": x if scale is None else Quantized(x, scale, block=fields["block"])}

    def bytes(self, problem: MeasuredStepProblem) -> int:
        """Return those of the rows that are read."""
        from jetfire.reference.measured_step import rows_read

        rows = len(range(problem.m)[rows_read(problem.m)])
        return rows * problem.n * dtype_of(problem.dtype).itemsize

    def reference(self, problem: MeasuredStepProblem, inputs: Tensors) -> Tensors:
        """Return the step, and what summing squares in fp32 may add to it.

        The root halves a relative error. Squares below 2^-126 may be lost.
        """
        from jetfire.reference.measured_step import measured_step, rows_read

        x = _values(problem, inputs)
        step = measured_step(x)
        chain = 8 * (problem.n // LEAST_TILE + 1) + 64
        bound = higham(chain) * step.nan_to_num(0.0, 0.0) + 2.0**-63
        squares = x[rows_read(problem.m)].square().sum().reshape(1)
        return {"step": step, "step_bound": bound, "step_over": squares >= OVER}

    def nothing(self, problem: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Write the least step."""
        from jetfire.reference.measured_step import LEAST

        outputs["step"].fill_(LEAST)

    def eager(self, problem: MeasuredStepProblem, inputs: Tensors) -> Callable[[], Any]:
        """Return the share of the whole matrix's root mean square, of BF16 where x is codes."""
        import torch

        from jetfire.reference.measured_step import OF_RMS

        x = inputs["x"] if "x_scale" not in inputs else _values(problem, inputs).bfloat16()
        share = OF_RMS / max(1, x.numel()) ** 0.5
        return lambda: share * torch.linalg.vector_norm(x, dtype=torch.float32)


def _values(problem: MeasuredStepProblem, inputs: Tensors) -> Tensor:
    """Return x in float64."""
    import torch

    from jetfire.reference.dequantize import dequantize

    x = inputs["x"]
    if "x_scale" in inputs:
        return dequantize(x, inputs["x_scale"], problem.block, torch.float64)
    return x.double()


OP = MeasuredStep()

_measured_step = Operator(
    "measured_step(Tensor x, Tensor? x_scale, int block) -> Tensor", dtype_field="dtype"
)


@checked
def int4_measured_step(x: Tensor | Quantized) -> Tensor:
    """Return the step to round a matrix with, fp32 (1,): 0.3352 of its root mean square.

    Of a matrix of many rows some 512 are read, the same ones each time, so that a forward that runs
    again gives the same codes. Of zeros it is 2^-60; NaN or infinite where a row that is read has a
    number that is not finite.

    Args:
        x: m×n bf16, fp16 or fp32; or INT8 codes.
    """
    if isinstance(x, Quantized):
        return _measured_step(*expect.quantized("x", x), x.block)
    expect.matrix("x", x, expect.FLOATS)
    return _measured_step(x, None, 32)
