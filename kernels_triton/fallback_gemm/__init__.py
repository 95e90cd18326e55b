"""The INT8 GEMM with fallback: the plain product, then the second plane's blocks that are not 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_triton.common import to_float
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    power_reason,
    share_reason,
    store_tile,
    tile_of,
    warps_reason,
)

MOST_BLOCKS = 4096  # along K, whose second scales a program holds in registers


@dataclass(frozen=True)
class FallbackGemmConfig(Config):
    """A tile of C per program, one block high and `tile_n` wide; `group` as in `gemm`."""

    tile_n: int = 128
    warps: int = 8
    stages: int = 4
    group: int = 8


@triton.jit
def add_block(
    acc,
    i,
    a_ptrs,
    a_scales,
    b_ptrs,
    b_scales,
    inner,
    K,
    BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Add to fp32 [BLOCK, blocks across, BLOCK] what block i of K adds to a tile's products."""
    scale = tl.load(a_scales + i) * tl.load(b_scales + i)
    if EVEN_K:
        a, b = tl.load(a_ptrs + i * BLOCK), tl.load(b_ptrs + i * BLOCK)
    else:
        valid = inner < K - i * BLOCK
        a = tl.load(a_ptrs + i * BLOCK, mask=valid[None, :], other=0)
        b = tl.load(b_ptrs + i * BLOCK, mask=valid[:, None], other=0)
    return tl.fma(tl.reshape(tl.dot(a, b).to(tl.float32), acc.shape), scale, acc)


@triton.jit
def fallback_gemm_kernel(
    a_ptr,
    a_scale_ptr,
    r_ptr,
    r_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_a,
    stride_r,
    stride_b,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    row, col0 = tile_of(tl.program_id(0), M, N, BLOCK, TILE_N, GROUP)
    row0, col0 = row * BLOCK, col0 * TILE_N
    # Rows beyond the edge read the last row again: nothing of them is kept.
    rows = tl.minimum(row0 + tl.arange(0, BLOCK), M - 1).to(tl.int64)
    cols = tl.minimum(col0 + tl.arange(0, TILE_N), N - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    blocks = tl.cdiv(K, BLOCK)
    a_ptrs = a_ptr + rows[:, None] * stride_a + inner[None, :]
    r_ptrs = r_ptr + rows[:, None] * stride_r + inner[None, :]
    b_ptrs = b_ptr + cols[None, :] * stride_b + inner[:, None]
    ACROSS: tl.constexpr = TILE_N // BLOCK
    across = tl.minimum(col0 // BLOCK + tl.arange(0, ACROSS), tl.cdiv(N, BLOCK) - 1)
    a_scales = a_scale_ptr + row.to(tl.int64) * blocks
    r_scales = r_scale_ptr + row.to(tl.int64) * blocks
    b_scales = b_scale_ptr + across.to(tl.int64)[None, :, None] * blocks
    acc = tl.zeros((BLOCK, ACROSS, BLOCK), tl.float32)
    for i in range(blocks):
        acc = add_block(acc, i, a_ptrs, a_scales, b_ptrs, b_scales, inner, K, BLOCK, EVEN_K)
    # Two loops, each pipelined, where one with a branch in it would not be.
    each = tl.arange(0, BLOCKS)
    falls = tl.load(r_scales + each, mask=each < blocks, other=0.0) != 0.0
    i = -1
    for _ in range(tl.sum(falls.to(tl.int32))):
        i = tl.min(tl.where(falls & (each > i), each, BLOCKS))
        acc = add_block(acc, i, r_ptrs, r_scales, b_ptrs, b_scales, inner, K, BLOCK, EVEN_K)
    acc = tl.reshape(acc, (BLOCK, TILE_N))
    if BIAS:
        cols = col0 + tl.arange(0, TILE_N)
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0)[None, :]
    c = to_float(acc, c_ptr.dtype.element_ty)
    if TRANSPOSE:
        store_tile(c_ptr, tl.trans(c), col0, row0, N, M, M)
    else:
        store_tile(c_ptr, c, row0, col0, M, N, N)


class TritonFallbackGemm(TritonKernel):
    op = "fallback_gemm"
    Config = FallbackGemmConfig
    choices: ClassVar = {
        "tile_n": (32, 64, 128, 256),
        "warps": (2, 4, 8, 16),
        "stages": (2, 3, 4, 5),
        "group": (1, 4, 8, 16),
    }

    def legal(self, problem: Any, config: FallbackGemmConfig, device: Device) -> str | None:
        block = problem.block
        reason = (
            device_reason(device)
            or power_reason(
                config,
                "tile_n",
                expected=f"a power of two that is a multiple of {block}",
                multiple=block,
            )
            or warps_reason(config)
            or share_reason(block * config.tile_n, config, 1, 128, "sums")
        )
        if reason is not None:
            return reason
        if ceil_div(problem.k, block) > MOST_BLOCKS:
            return f"k={problem.k}: expected at most {MOST_BLOCKS * block} in blocks of {block}"
        shared = config.stages * (block + config.tile_n) * block
        if device.kind == "cuda" and shared > device.shared_bytes:
            return f"{shared} bytes of shared memory: {device.label} has {device.shared_bytes}"
        return grid_reason(ceil_div(problem.m, block) * ceil_div(problem.n, config.tile_n))

    def default(self, problem: Any, device: Device) -> FallbackGemmConfig:
        stages = 4
        if device.kind == "cuda":
            stages = min(4, device.shared_bytes // ((problem.block + 128) * problem.block))
        return FallbackGemmConfig(128, 8 if problem.block == 128 else 4, stages)

    def launches(
        self, problem: Any, config: FallbackGemmConfig, device: Device
    ) -> tuple[Launch, ...]:
        blocks = ceil_div(problem.k, problem.block)
        return (
            Launch(
                fallback_gemm_kernel,
                (ceil_div(problem.m, problem.block) * ceil_div(problem.n, config.tile_n),),
                problem,
                config,
                {"stride_a": "a", "stride_r": "r", "stride_b": "b"},
                BLOCKS=1 << (blocks - 1).bit_length(),
                EVEN_K=problem.k % problem.block == 0,
                num_stages=config.stages,
                **EXACT,
            ),
        )


KERNELS = (TritonFallbackGemm(),)
