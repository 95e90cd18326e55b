"""RMSNorm in plain Triton, a row of tiles per program, for every device and the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.common import quantize_tile
from jetfire.kernels_triton.halves import narrow, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.rows import column_sums, load_values, load_vector
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    load_tile,
    store_quantised,
    store_tile,
)


@triton.jit
def forward_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    rstd_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    eps,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Write rstd and y = x·rstd·weight of TILE_M whole rows."""
    row0 = tl.program_id(0) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    square = tl.zeros((TILE_M, TILE_N), tl.float32)
    for col0 in range(0, N, TILE_N):
        x = load_values(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
        )
        square += x * x
    rstd = tl.rsqrt(tl.sum(square, 1) / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    for col0 in range(0, N, TILE_N):
        x = load_values(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
        )
        weight = load_vector(weight_ptr, col0 + tl.arange(0, TILE_N), N)
        y = x * rstd[:, None] * weight[None, :]
        # Without eps the rstd of rows beyond the last is infinite.
        inside = (rows < M)[:, None] & (col0 + tl.arange(0, TILE_N) < N)[None, :]
        q, scale = quantize_tile(tl.where(inside, y, 0.0), seed, row0, col0, OUT_BLOCK, STOCHASTIC)
        store_quantised(
            q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
        )


@triton.jit
def backward_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    rstd_ptr,
    dsum_ptr,
    seed_ptr,
    total_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    part_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    dsum_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Write dx = rstd·(g − x̂·mean(g·x̂)), g = dy·weight, of TILE_M whole rows; their Σ dy·x̂.

    RESIDUAL adds dsum to dx, rounds the sum to bf16, writes it, and the codes of it.
    """
    row0 = tl.program_id(0) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    rstd = load_vector(rstd_ptr, rows, M)[:, None]
    part_at = part_ptr + tl.program_id(0).to(tl.int64) * N
    along = tl.zeros((TILE_M, TILE_N), tl.float32)
    for col0 in range(0, N, TILE_N):
        cols = col0 + tl.arange(0, TILE_N)
        x = load_values(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
        )
        dy = load_values(
            dy_ptr,
            dy_scale_ptr,
            row0,
            col0,
            M,
            N,
            dy_stride,
            dy_scale_stride,
            TILE_M,
            TILE_N,
            BLOCK,
        )
        xhat = x * rstd
        tl.store(part_at + cols, tl.sum(dy * xhat, 0), mask=cols < N)
        inside = (cols < N)[None, :]
        weight = load_vector(weight_ptr, cols, N)[None, :]
        along += tl.where(inside, (dy * weight) * xhat, 0.0)
    mean = (tl.sum(along, 1) / N)[:, None]
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    for col0 in range(0, N, TILE_N):
        cols = col0 + tl.arange(0, TILE_N)
        x = load_values(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
        )
        dy = load_values(
            dy_ptr,
            dy_scale_ptr,
            row0,
            col0,
            M,
            N,
            dy_stride,
            dy_scale_stride,
            TILE_M,
            TILE_N,
            BLOCK,
        )
        g = dy * load_vector(weight_ptr, cols, N)[None, :]
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        dx = tl.where(inside, rstd * (g - (x * rstd) * mean), 0.0)
        if RESIDUAL:
            dsum = load_tile(dsum_ptr, row0, col0, M, N, dsum_stride, TILE_M, TILE_N)
            total = narrow(widen(dsum) + dx)
            store_tile(total_ptr, total, row0, col0, M, N, N)
            dx = widen(total)
        q, scale = quantize_tile(dx, seed, row0, col0, OUT_BLOCK, STOCHASTIC)
        store_quantised(
            q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
        )


class TritonRmsNorm(TileKernel):
    op = "rmsnorm"

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return 32 elements per thread; 64 in blocks of 128.

        Threads of 16 warps would have too few registers.
        """
        block = self.side(problem)
        tile_n = max(block, 64)
        return TileConfig(block, tile_n, min(8, block * tile_n // 1024))

    def launches(self, problem: Any, config: TileConfig, device: Device) -> Sequence[Launch]:
        grid = (ceil_div(problem.m, config.tile_m),)
        if problem.mode == "fwd":
            return (Launch(forward_kernel, grid, problem, config, **EXACT),)
        of = {"part_ptr": "dweight_parts", "total_ptr": "dx"}
        stride = {} if problem.residual else {"dsum_stride": None}
        return (
            Launch(backward_kernel, grid, problem, config, of, **stride, **EXACT),
            column_sums(problem, config, "dweight"),
        )

    def tensors(
        self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        if problem.mode == "fwd":
            return {**inputs, **outputs}
        shape = ceil_div(problem.m, config.tile_m), problem.n
        parts = torch.empty(shape, dtype=torch.float32, device=inputs["x"].device)
        return {**inputs, **outputs, "dweight_parts": parts}
