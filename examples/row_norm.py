"""The Euclidean norm of each row: one op, and a kernel in CUDA C++ for it.

jetfire bench row_norm --load row_norm.py --m 8192 --n 4096
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from jetfire.core import expect
from jetfire.core.arguments import checked
from jetfire.core.kernel import Config
from jetfire.core.operators import Operator
from jetfire.core.problem import Problem
from jetfire.core.tensors import Spec, Specs, Tensors
from jetfire.kernels_cuda.inline import InlineKernel
from jetfire.measure import bounds
from jetfire.measure.op import StandardOp

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_norm"]


@dataclass(frozen=True)
class RowNormProblem(Problem):
    """x (m×n fp32) to y (m), the norm of each row."""


class RowNorm(StandardOp):
    name = "row_norm"
    summary = "Euclidean norm of each row"
    Problem = RowNormProblem
    sums: ClassVar = {"n": ("y",)}
    same_bits_over = "runs"  # in which order a row is summed depends on the config

    def reads(self, problem: RowNormProblem) -> Specs:
        return {"x": Spec("fp32", (problem.m, problem.n))}

    def writes(self, problem: RowNormProblem) -> Specs:
        return {"y": Spec("fp32", (problem.m,))}

    def reference(self, problem: RowNormProblem, inputs: Tensors) -> Tensors:
        """Return y in float64, with the error of a chain of n/32 + 32 sums and of lost squares."""
        squares = inputs["x"].double().square().sum(dim=1)
        noise = bounds.higham(problem.n // 32 + 32) * squares.sqrt() + problem.n**0.5 * 2.0**-75
        return bounds.of_float("y", squares.sqrt(), "fp32", noise, squares >= bounds.OVER)

    def eager(self, problem: RowNormProblem, inputs: Tensors) -> Callable[[], Any]:
        return lambda: torch.linalg.vector_norm(inputs["x"], dim=1)


OP = RowNorm()


@dataclass(frozen=True)
class RowNormConfig(Config):
    warps: int = 4
    unroll: int = 4


class CudaRowNorm(InlineKernel):
    op = "row_norm"
    Config = RowNormConfig
    choices: ClassVar = {"warps": (1, 2, 4, 8, 16), "unroll": (1, 2, 4, 8)}
    code = r"""
#include "config.cuh"

// One block per row. WARPS and UNROLL are the config's.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
row_norm_kernel(const float* x, float* y, long long n, long long x_stride) {
  __shared__ float parts[WARPS];
  const float* row = x + blockIdx.x * x_stride;
  float sum = 0.0f;
#pragma unroll UNROLL
  for (long long i = threadIdx.x; i < n; i += 32 * WARPS) sum += row[i] * row[i];
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < WARPS; ++warp) sum += parts[warp];
    y[blockIdx.x] = sqrtf(sum);
  }
}
"""

    def blocks(self, problem: RowNormProblem, config: RowNormConfig) -> int:
        return problem.m


KERNELS = (CudaRowNorm(),)


# --- what a model calls, and torch.ops.jetfire has ----------------------------------------------


@checked
def row_norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of x (m×n fp32): m fp32."""
    expect.matrix("x", x, ("float32",))
    return _row_norm(x)


_row_norm = Operator("row_norm(Tensor x) -> Tensor")
