"""Constants of a problem for `config.cuh`, the same for all kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetfire.kernels_cuda.block_gemm import OUTPUTS

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

# Numbers of epilogue.cuh's enum.
PRODUCTS = {"fwd": 0, "dgrad": 1, "wgrad": 2}


def problem_constants(problem: Int4GemmProblem) -> dict[str, bool | int]:
    """Return the constants that the epilogue depends on."""
    return {
        "PRODUCT": PRODUCTS[problem.product],
        "OUTPUT": OUTPUTS[problem.out],
        "OUT_BLOCK": problem.out_block,
        "Q": problem.out == "int8",
        "QT": False,
        "STOCHASTIC": False,
        "BIAS": problem.bias,
    }
