"""Constants of a problem for `config.cuh`, the same for both kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetfire.kernels_cuda.block_gemm import OUTPUTS

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem


def problem_constants(problem: GemmProblem) -> dict[str, bool | int]:
    """Return blocks, output and epilogue; the code depends on nothing else of a problem."""
    return {
        "BLOCK": problem.block,
        "OUT_BLOCK": problem.out_block,
        "OUTPUT": OUTPUTS[problem.out],
        "BIAS": problem.bias,
        "ACCUMULATE": problem.accumulate,
        "SQUARES": problem.squares,
        "STOCHASTIC": problem.rounding == "stochastic",
        "Q": problem.out == "int8" and problem.layout != "qt",
        "QT": problem.layout != "q",
    }
