"""The logarithm of each row's sum of exponentials: one op, and a library's call as its kernel.

jetfire bench row_logsumexp --load row_logsumexp.py --m 8192 --n 4096
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.kernel import Config, PythonKernel
from jetfire.core.operators import Operator
from jetfire.core.problem import Problem
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.measure import bounds
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_logsumexp"]


@dataclass(frozen=True)
class RowLogsumexpProblem(Problem):
    """x (m×n fp32) to y (m), log Σ exp x of each row."""


class RowLogsumexp(StandardOp):
    name = "row_logsumexp"
    summary = "logarithm of each row's sum of exponentials"
    Problem = RowLogsumexpProblem
    never_empty = frozenset({"n"})

    def reads(self, problem: RowLogsumexpProblem) -> Specs:
        return {"x": Spec("fp32", (problem.m, problem.n))}

    def writes(self, problem: RowLogsumexpProblem) -> Specs:
        return {"y": Spec("fp32", (problem.m,))}

    def reference(self, problem: RowLogsumexpProblem, inputs: Tensors) -> Tensors:
        """Return y = max x + log Σ exp(x − max x) in float64; fp32 may be off by 2e-5."""
        x = inputs["x"].double()
        largest = x.amax(dim=1)
        y = largest + (x - largest[:, None]).exp().sum(dim=1).log()
        y = torch.where(largest.isinf(), largest, y)  # of a sum that is infinite, or of nothing
        return bounds.of_float("y", y, "fp32", torch.full_like(y, 2e-5))

    def eager(self, problem: RowLogsumexpProblem, inputs: Tensors) -> Callable[[], Any]:
        return lambda: torch.logsumexp(inputs["x"], dim=1)


OP = RowLogsumexp()


@dataclass(frozen=True)
class RowLogsumexpConfig(Config):
    """Rows per call: what a call keeps between its passes should fit in a cache."""

    rows: int = 256


class TorchRowLogsumexp(PythonKernel):
    op = "row_logsumexp"
    name = "torch"
    Config = RowLogsumexpConfig
    choices: ClassVar = {"rows": (16, 64, 256, 1024, 4096)}

    def results(
        self, problem: RowLogsumexpProblem, config: RowLogsumexpConfig, inputs: Tensors
    ) -> Tensors:
        parts = inputs["x"].split(config.rows)
        return {"y": torch.cat([torch.logsumexp(part, dim=1) for part in parts])}


KERNELS = (TorchRowLogsumexp(),)


# --- what a model calls, and torch.ops.jetfire has ----------------------------------------------


@checked
def row_logsumexp(x: Tensor) -> Tensor:
    """Return log Σ exp of each row of x (m×n fp32): m fp32."""
    expect.matrix("x", x, ("float32",))
    return _row_logsumexp(x)


_row_logsumexp = Operator("row_logsumexp(Tensor x) -> Tensor")
