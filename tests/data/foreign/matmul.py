"""A kernel as its author has it, with a script that times it: a BF16 product, in Triton alone."""

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

M, N, K, GROUP = 128, 256, 64, 8


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    m,
    n,
    k,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    down, across = tl.cdiv(m, M), tl.cdiv(n, N)
    first = program // (GROUP * across) * GROUP
    rows_of_group = min(down - first, GROUP)
    row = first + program % (GROUP * across) % rows_of_group
    column = program % (GROUP * across) // rows_of_group
    at_m, at_n = row * M + tl.arange(0, M), column * N + tl.arange(0, N)
    at_k = tl.arange(0, K)
    a = a_ptr + at_m[:, None] * k + at_k[None, :]
    b = b_ptr + at_k[:, None] * n + at_n[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for _ in range(0, k, K):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += K
        b += K * n
    tl.store(c_ptr + at_m[:, None] * n + at_n[None, :], total.to(tl.bfloat16))


def matmul(a, b, c):
    """Write the product of a (m×k) and b (k×n), bf16, to c; sizes are multiples of the tile's."""
    (m, k), n = a.shape, b.shape[1]
    grid = (triton.cdiv(m, M) * triton.cdiv(n, N),)
    matmul_kernel[grid](a, b, c, m, n, k, M, N, K, GROUP, num_warps=8, num_stages=3)


def inputs(m, n):
    shapes = (m, m), (m, n), (m, n)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def milliseconds(m, n):
    a, b, c = inputs(m, n)
    return do_bench(lambda: matmul(a, b, c), warmup=300, rep=1000, return_mode="median")
