"""The per-block INT8 GEMM on tensor cores: one int32 dot and one promotion per block of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.kernels_triton.common import quantize_tile, to_float
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    power_reason,
    share_reason,
    store_quantised,
    store_tile,
    tile_count,
    tile_of,
    warps_reason,
)


@dataclass(frozen=True)
class PortableConfig(Config):
    """A tile_m×tile_n tile of C per program; `group` rows of tiles are walked column by column."""

    tile_m: int = 128
    tile_n: int = 128
    warps: int = 8
    stages: int = 4
    group: int = 8


@triton.jit
def gemm_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    c_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    squares_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INT8: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SQUARES: tl.constexpr,
):
    tile_row, tile_col = tile_of(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    row0, col0 = tile_row * TILE_M, tile_col * TILE_N
    # Rows beyond the edge read the last row again: nothing of them is kept.
    rows = tl.minimum(row0 + tl.arange(0, TILE_M), M - 1).to(tl.int64)
    cols = tl.minimum(col0 + tl.arange(0, TILE_N), N - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    blocks = tl.cdiv(K, BLOCK)
    a_ptrs = a_ptr + rows[:, None] * stride_a + inner[None, :]
    b_ptrs = b_ptr + cols[None, :] * stride_b + inner[:, None]
    # One scale per block, multiplied in four dimensions: a thread keeps as few as its blocks.
    DOWN: tl.constexpr = TILE_M // BLOCK
    ACROSS: tl.constexpr = TILE_N // BLOCK
    down = tl.minimum(row0 // BLOCK + tl.arange(0, DOWN), tl.cdiv(M, BLOCK) - 1)
    across = tl.minimum(col0 // BLOCK + tl.arange(0, ACROSS), tl.cdiv(N, BLOCK) - 1)
    a_scales = a_scale_ptr + down.to(tl.int64)[:, None, None, None] * blocks
    b_scales = b_scale_ptr + across.to(tl.int64)[None, None, :, None] * blocks
    acc = tl.zeros((DOWN, BLOCK, ACROSS, BLOCK), tl.float32)
    for i in range(blocks):
        scale = tl.load(a_scales + i) * tl.load(b_scales + i)
        if EVEN_K:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            valid = inner < K - i * BLOCK
            a = tl.load(a_ptrs, mask=valid[None, :], other=0)
            b = tl.load(b_ptrs, mask=valid[:, None], other=0)
        sums = tl.dot(a, b).to(tl.float32)
        acc = tl.fma(tl.reshape(sums, (DOWN, BLOCK, ACROSS, BLOCK)), scale, acc)
        a_ptrs += BLOCK
        b_ptrs += BLOCK
    acc = tl.reshape(acc, (TILE_M, TILE_N))
    finish(
        acc,
        bias_ptr,
        c_ptr,
        q_ptr,
        scale_ptr,
        qt_ptr,
        scale_t_ptr,
        seed_ptr,
        row0,
        col0,
        M,
        N,
        OUT_BLOCK,
        BIAS,
        ACCUMULATE,
        INT8,
        LAYOUT,
        STOCHASTIC,
    )
    if SQUARES:
        store_squares(acc, squares_ptr, row0, col0, M, N)


@triton.jit
def store_squares(acc, ptr, row0, col0, M, N):
    """Write a tile's Σx² of each 16 rows and 32 columns; what lies beyond C counts as 0."""
    DOWN: tl.constexpr = acc.shape[0] // 16
    ACROSS: tl.constexpr = acc.shape[1] // 32
    rows, cols = row0 + tl.arange(0, acc.shape[0]), col0 + tl.arange(0, acc.shape[1])
    acc = tl.where((rows < M)[:, None] & (cols < N)[None, :], acc, 0.0)
    sums = tl.sum(tl.sum(tl.reshape(acc * acc, (DOWN, 16, ACROSS, 32)), 3), 1)
    across = tl.cdiv(N, 32)
    store_tile(ptr, sums, row0 // 16, col0 // 32, tl.cdiv(M, 16), across, across)


@triton.jit
def finish(
    acc,
    bias_ptr,
    c_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    row0,
    col0,
    M,
    N,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INT8: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Add bias and what C held to an fp32 tile, cast it or requantise its blocks, and write it."""
    rows, cols = row0 + tl.arange(0, acc.shape[0]), col0 + tl.arange(0, acc.shape[1])
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0)[None, :]
    if INT8:
        acc = tl.where(inside, acc, 0.0)
        seed = tl.load(seed_ptr) if STOCHASTIC else 0
        q, scale = quantize_tile(acc, seed, row0, col0, BLOCK, STOCHASTIC)
        store_quantised(
            q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT
        )
    else:
        if ACCUMULATE:
            offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
            acc += tl.load(c_ptr + offsets, mask=inside, other=0).to(tl.float32)
        store_tile(c_ptr, to_float(acc, c_ptr.dtype.element_ty), row0, col0, M, N, N)


class TritonGemm(TritonKernel):
    op = "gemm"
    Config = PortableConfig
    choices: ClassVar = {
        "tile_m": (32, 64, 128, 256),
        "tile_n": (32, 64, 128, 256),
        "warps": (2, 4, 8, 16),
        "stages": (2, 3, 4, 5),
        "group": (1, 4, 8, 16),
    }

    def legal(self, problem: Any, config: PortableConfig, device: Device) -> str | None:
        block, size = max(problem.block, problem.out_block), config.tile_m * config.tile_n
        expected = f"a power of two that is a multiple of {block}"
        reason = (
            device_reason(device)
            or power_reason(config, "tile_m", "tile_n", expected=expected, multiple=block)
            or warps_reason(config)
            or share_reason(size, config, 1, 128, "sums")
        )
        if reason is not None:
            return reason
        if size > 32768:
            # The epilogue transposes the fp32 tile in shared memory: 256 KiB at 256×256.
            return f"tile_m={config.tile_m} tile_n={config.tile_n}: expected at most 32768 sums"
        shared = config.stages * (config.tile_m + config.tile_n) * problem.block
        if device.kind == "cuda" and shared > device.shared_bytes:
            return f"{shared} bytes of shared memory: {device.label} has {device.shared_bytes}"
        return grid_reason(tile_count(problem.m, problem.n, config))

    def default(self, problem: Any, device: Device) -> PortableConfig:
        # On an H200 at 8192³ in TOPS, 64×128 by 4 warps, several to an SM, against 128×128 by 8:
        # 391 and 310 with blocks of 32, 686 and 587 of 64; blocks of 128 reach 825 in the latter.
        tile_m, warps = (128, 8) if 128 in (problem.block, problem.out_block) else (64, 4)
        stages = 4
        if device.kind == "cuda":
            stages = min(4, device.shared_bytes // ((tile_m + 128) * problem.block))
        return PortableConfig(tile_m, 128, warps, stages)

    def launches(self, problem: Any, config: PortableConfig, device: Device) -> tuple[Launch, ...]:
        return (
            Launch(
                gemm_kernel,
                (tile_count(problem.m, problem.n, config),),
                problem,
                config,
                {"stride_a": "a", "stride_b": "b"},
                EVEN_K=problem.k % problem.block == 0,
                INT8=problem.out == "int8",
                num_stages=config.stages,
                **EXACT,
            ),
        )
