"""Constants of a problem for `config.cuh`, the same for all kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

# Numbers of epilogue.cuh's enums.
OUTPUTS = {"fp32": 0, "bf16": 1, "fp16": 2}
PRODUCTS = {"fwd": 0, "dgrad": 1, "wgrad": 2}


def problem_constants(problem: Int4GemmProblem) -> dict[str, bool | int]:
    """Return the constants that the epilogue depends on."""
    return {
        "PRODUCT": PRODUCTS[problem.product],
        "OUTPUT": OUTPUTS[problem.out],
        "BIAS": problem.bias,
    }
