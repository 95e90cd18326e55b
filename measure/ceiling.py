"""The INT8 rate of a GPU's matrix units when nothing else limits them: a roofline's ceiling."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def int8_kernel(a_ptr, b_ptr, c_ptr, rounds, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Compute c (M×N) += a (M×K) · bᵀ (N×K) `rounds` times, with operands that stay on the SM."""
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + cols[:, None] * K + inner[None, :])
    c = tl.zeros((M, N), tl.int32)
    for _ in range(rounds):
        c = tl.dot(a, tl.trans(b), c, out_dtype=tl.int32)
    tl.store(c_ptr + tl.program_id(0) * M * N + rows[:, None] * N + cols[None, :], c)


def int8_call(device: torch.device, programs: int, rounds: int) -> tuple[Callable[[], None], float]:
    """Return a launch of `programs` tiles, and the number of its operations.

    Of seven shapes on an H200, one warp group per tile of 128×128×256 and three tiles per SM did
    best: 1861 TOPS. Two warp groups of 128×256×256 did 1794, of 128×256×128 1755.
    """
    m, n, k = 128, 128, 256
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    c = torch.empty((programs, m, n), dtype=torch.int32, device=device)

    def call() -> None:
        int8_kernel[(programs,)](a, b, c, rounds, M=m, N=n, K=k, num_warps=4)

    return call, 2.0 * m * n * k * rounds * programs
