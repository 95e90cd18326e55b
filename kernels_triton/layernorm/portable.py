"""LayerNorm in plain Triton, tile by tile, for every device and the interpreter."""

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
    tile_count,
    tile_origin,
)

ROWS = 8  # whole rows that a program reduces


@triton.jit
def statistics_kernel(
    x_ptr,
    x_scale_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    x_stride,
    scale_stride,
    eps,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write mean and rstd of R whole rows: the mean first, then squares of differences from it."""
    row0 = tl.program_id(0) * R
    rows = row0 + tl.arange(0, R)
    total = tl.zeros((R, C), tl.float32)
    for col0 in range(0, N, C):
        total += load_values(
            x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, scale_stride, R, C, BLOCK
        )
    mean = tl.sum(total, 1) / N
    square = tl.zeros((R, C), tl.float32)
    for col0 in range(0, N, C):
        x = load_values(x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, scale_stride, R, C, BLOCK)
        inside = (col0 + tl.arange(0, C) < N)[None, :]
        difference = tl.where(inside, x - mean[:, None], 0.0)
        square += difference * difference
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, tl.rsqrt(tl.sum(square, 1) / N + eps), mask=rows < M)


@triton.jit
def normalise_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    x_stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Write y = (x − mean)·rstd·weight + bias of one tile."""
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    rows, cols = row0 + tl.arange(0, TILE_M), col0 + tl.arange(0, TILE_N)
    x = load_values(
        x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, scale_stride, TILE_M, TILE_N, BLOCK
    )
    rstd = load_vector(rstd_ptr, rows, M)[:, None]
    xhat = (x - load_vector(mean_ptr, rows, M)[:, None]) * rstd
    y = xhat * load_vector(weight_ptr, cols, N)[None, :] + load_vector(bias_ptr, cols, N)[None, :]
    y = tl.where((rows < M)[:, None] & (cols < N)[None, :], y, 0.0)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    q, scale = quantize_tile(y, seed, row0, col0, OUT_BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
    )


@triton.jit
def row_sums_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    plain_ptr,
    along_ptr,
    M,
    N,
    x_stride,
    x_scale_stride,
    dy_stride,
    dy_scale_stride,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write mean(g) and mean(g·x̂) of R whole rows, g = dy·weight."""
    row0 = tl.program_id(0) * R
    rows = row0 + tl.arange(0, R)
    mean, rstd = load_vector(mean_ptr, rows, M)[:, None], load_vector(rstd_ptr, rows, M)[:, None]
    plain = tl.zeros((R, C), tl.float32)
    along = tl.zeros((R, C), tl.float32)
    for col0 in range(0, N, C):
        x = load_values(x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, R, C, BLOCK)
        dy = load_values(
            dy_ptr, dy_scale_ptr, row0, col0, M, N, dy_stride, dy_scale_stride, R, C, BLOCK
        )
        g = dy * load_vector(weight_ptr, col0 + tl.arange(0, C), N)[None, :]
        plain += g
        along += g * ((x - mean) * rstd)
    tl.store(plain_ptr + rows, tl.sum(plain, 1) / N, mask=rows < M)
    tl.store(along_ptr + rows, tl.sum(along, 1) / N, mask=rows < M)


@triton.jit
def gradient_kernel(
    x_ptr,
    x_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    plain_ptr,
    along_ptr,
    dsum_ptr,
    seed_ptr,
    total_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    dweight_ptr,
    dbias_ptr,
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
    """Write dx = rstd·(g − mean(g) − x̂·mean(g·x̂)) of one tile, and its sums over rows.

    The sums are [tiles down, N]: Σ dy·x̂ for the weight, Σ dy for the bias. RESIDUAL adds dsum to
    dx, rounds the sum to bf16, writes it, and the codes of it.
    """
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    rows, cols = row0 + tl.arange(0, TILE_M), col0 + tl.arange(0, TILE_N)
    x = load_values(
        x_ptr, x_scale_ptr, row0, col0, M, N, x_stride, x_scale_stride, TILE_M, TILE_N, BLOCK
    )
    dy = load_values(
        dy_ptr, dy_scale_ptr, row0, col0, M, N, dy_stride, dy_scale_stride, TILE_M, TILE_N, BLOCK
    )
    rstd = load_vector(rstd_ptr, rows, M)[:, None]
    xhat = (x - load_vector(mean_ptr, rows, M)[:, None]) * rstd
    plain = load_vector(plain_ptr, rows, M)[:, None]
    along = load_vector(along_ptr, rows, M)[:, None]
    dx = rstd * (dy * load_vector(weight_ptr, cols, N)[None, :] - plain - xhat * along)
    dx = tl.where((rows < M)[:, None] & (cols < N)[None, :], dx, 0.0)
    at = (row0 // TILE_M).to(tl.int64) * N + cols
    tl.store(dweight_ptr + at, tl.sum(dy * xhat, 0), mask=cols < N)
    tl.store(dbias_ptr + at, tl.sum(dy, 0), mask=cols < N)
    if RESIDUAL:
        dsum = load_tile(dsum_ptr, row0, col0, M, N, dsum_stride, TILE_M, TILE_N)
        total = narrow(widen(dsum) + dx)
        store_tile(total_ptr, total, row0, col0, M, N, N)
        dx = widen(total)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    q, scale = quantize_tile(dx, seed, row0, col0, OUT_BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
    )


class TritonLayerNorm(TileKernel):
    op = "layernorm"

    def default(self, problem: Any, device: Device) -> TileConfig:
        tile = max(self.side(problem), 64)
        return TileConfig(tile, tile, 4 if tile == 64 else 16)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> Sequence[Launch]:
        m, n = problem.m, problem.n
        whole = {"R": ROWS, "C": 512, "num_warps": 4}
        rows, tiles = (ceil_div(m, ROWS),), (tile_count(m, n, config),)
        of = {"scale_stride": "x_scale", "total_ptr": "dx"}
        if problem.mode == "fwd":
            found = (
                Launch(statistics_kernel, rows, problem, config, of, **whole),
                Launch(normalise_kernel, tiles, problem, config, of, **EXACT),
            )
            return found if problem.stats == "row" else found[1:]
        of |= {"dweight_ptr": "dweight_parts", "dbias_ptr": "dbias_parts"}
        stride = {} if problem.residual else {"dsum_stride": None}
        sums = [column_sums(problem, config, name) for name in ("dweight", "dbias")]
        return (
            Launch(row_sums_kernel, rows, problem, config, **whole),
            Launch(gradient_kernel, tiles, problem, config, of, **stride, **EXACT),
            *sums,
        )

    def tensors(
        self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        if problem.mode == "fwd":
            return {**inputs, **outputs}
        m, n, device = problem.m, problem.n, inputs["x"].device
        plain, along = torch.empty((2, m), dtype=torch.float32, device=device)
        parts = torch.empty((2, ceil_div(m, config.tile_m), n), dtype=torch.float32, device=device)
        sums = {"plain": plain, "along": along, "dweight_parts": parts[0], "dbias_parts": parts[1]}
        return {**inputs, **outputs, **sums}
