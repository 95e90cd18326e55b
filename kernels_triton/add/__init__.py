"""Residual addition, forward and backward: one tile per program, one pass over memory.

Forward also gives each row's mean and rstd: every tile leaves its rows' mean and sum of squared
deviations, and the last tile of a band of rows to arrive combines them, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.codes import codes_to_floats
from jetfire.kernels_triton.common import (
    block_scales,
    spread,
    tile_codes,
)
from jetfire.kernels_triton.halves import halvings, narrow, tile_amax, widen
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    at_most,
    load_tile,
    store_quantised,
    store_tile,
    tile_count,
    tile_origin,
)


@triton.jit
def add_tile(
    x_ptr,
    y_ptr,
    y_scale_ptr,
    sum_ptr,
    row0,
    col0,
    M,
    N,
    x_stride,
    y_stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write round(x + y·scale) of one tile, bf16, and return it."""
    x = widen(load_tile(x_ptr, row0, col0, M, N, x_stride, TILE_M, TILE_N))
    y = codes_to_floats(load_tile(y_ptr, row0, col0, M, N, y_stride, TILE_M, TILE_N))
    scale = load_tile(
        y_scale_ptr,
        row0 // BLOCK,
        col0 // BLOCK,
        tl.cdiv(M, BLOCK),
        tl.cdiv(N, BLOCK),
        scale_stride,
        TILE_M // BLOCK,
        TILE_N // BLOCK,
    )
    total = narrow(x + y * spread(scale, BLOCK))
    store_tile(sum_ptr, total, row0, col0, M, N, N)
    return total


@triton.jit
def combine(
    partial_ptr,
    mean_ptr,
    rstd_ptr,
    row0,
    M,
    N,
    eps,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write mean and rstd of TILE_M whole rows, from their tiles' means and squared deviations.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979, equation 2.1, for all tiles at once.
    """
    across = tl.cdiv(N, TILE_N)
    rows = row0 + tl.arange(0, TILE_M)
    tiles = tl.arange(0, CHUNK)
    total = tl.zeros((TILE_M,), tl.float32)
    for first in range(0, across, CHUNK):
        tile = first + tiles
        inside = (tile < across)[:, None] & (rows < M)[None, :]
        at = partial_ptr + tile.to(tl.int64)[:, None] * M + rows[None, :]
        count = tl.minimum(N - tile * TILE_N, TILE_N).to(tl.float32)
        part = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        total += tl.sum(part * count[:, None], 0)
    mean = total / N
    squares = tl.zeros((TILE_M,), tl.float32)
    for first in range(0, across, CHUNK):
        tile = first + tiles
        inside = (tile < across)[:, None] & (rows < M)[None, :]
        at = partial_ptr + tile.to(tl.int64)[:, None] * M + rows[None, :]
        count = tl.minimum(N - tile * TILE_N, TILE_N).to(tl.float32)
        part = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        square = tl.load(at + across.to(tl.int64) * M, mask=inside, other=0.0, cache_modifier=".cg")
        deviation = tl.where(inside, part - mean[None, :], 0.0)
        squares += tl.sum(square + deviation * deviation * count[:, None], 0)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, tl.rsqrt(squares / N + eps), mask=rows < M)


@triton.jit
def add_forward_kernel(
    x_ptr,
    y_ptr,
    y_scale_ptr,
    sum_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    mean_ptr,
    rstd_ptr,
    partial_ptr,
    counter_ptr,
    seed_ptr,
    M,
    N,
    x_stride,
    y_stride,
    scale_stride,
    eps,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    across = tl.cdiv(N, TILE_N)
    total = add_tile(
        x_ptr,
        y_ptr,
        y_scale_ptr,
        sum_ptr,
        row0,
        col0,
        M,
        N,
        x_stride,
        y_stride,
        scale_stride,
        TILE_M,
        TILE_N,
        BLOCK,
    )
    rows = row0 + tl.arange(0, TILE_M)
    cols = col0 + tl.arange(0, TILE_N)
    wide = widen(total)
    mean = tl.sum(wide, 1) / tl.minimum(N - col0, TILE_N)
    deviation = tl.where((cols < N)[None, :], wide - mean[:, None], 0.0)
    at = partial_ptr + (col0 // TILE_N).to(tl.int64) * M + rows
    tl.store(at, mean, mask=rows < M)
    tl.store(at + across.to(tl.int64) * M, tl.sum(deviation * deviation, 1), mask=rows < M)
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    scale, multiplier = block_scales(tile_amax(total, OUT_BLOCK, HALVINGS))
    q = tile_codes(widen(total), multiplier, seed, row0, col0, OUT_BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
    )
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row0 // TILE_M, 1, sem="acq_rel")
    if arrived == across - 1:
        tl.store(counter_ptr + row0 // TILE_M, 0)
        combine(partial_ptr, mean_ptr, rstd_ptr, row0, M, N, eps, TILE_M, TILE_N, 1024 // TILE_M)


@triton.jit
def add_backward_kernel(
    x_ptr,
    y_ptr,
    y_scale_ptr,
    sum_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    x_stride,
    y_stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    total = add_tile(
        x_ptr,
        y_ptr,
        y_scale_ptr,
        sum_ptr,
        row0,
        col0,
        M,
        N,
        x_stride,
        y_stride,
        scale_stride,
        TILE_M,
        TILE_N,
        BLOCK,
    )
    seed = tl.load(seed_ptr) if STOCHASTIC else 0
    scale, multiplier = block_scales(tile_amax(total, OUT_BLOCK, HALVINGS))
    q = tile_codes(widen(total), multiplier, seed, row0, col0, OUT_BLOCK, STOCHASTIC)
    store_quantised(
        q, scale, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, OUT_BLOCK, LAYOUT
    )


class TritonAdd(TileKernel):
    op = "add"

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return the fastest tile at 8192×4096 and 8192×16384 on an H200, of those measured.

        None was of unequal blocks: theirs is that of the larger.
        """
        larger = self.side(problem)
        if larger == 128:
            return TileConfig(128, 128, 8)
        if larger == 64:
            return TileConfig(64, 128, 8) if problem.mode == "fwd" else TileConfig(64, 64, 4)
        return TileConfig(32, 256, 8)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        # Three tiles of 8 warps fit an SM at 80, two at 128; 64 elements per thread need 128.
        each = config.tile_m * config.tile_n // (32 * config.warps)
        return (
            Launch(
                add_backward_kernel if problem.mode == "bwd" else add_forward_kernel,
                (tile_count(problem.m, problem.n, config),),
                problem,
                config,
                {"scale_stride": "y_scale"},
                HALVINGS=halvings(problem.out_block, config),
                **at_most(80 if each <= 32 else 128, config),
                **EXACT,
            ),
        )

    def tensors(
        self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        if problem.mode == "bwd":
            read = {"x": inputs["dsum"], "y": inputs["dq"], "y_scale": inputs["dq_scale"]}
            return {**inputs, **outputs, **read, "sum": outputs["dx"]}
        device, m = inputs["x"].device, problem.m
        bands, across = ceil_div(m, config.tile_m), ceil_div(problem.n, config.tile_n)
        partial = torch.empty((2, across, m), dtype=torch.float32, device=device)
        return {**inputs, **outputs, "partial": partial, "counter": counters(device, bands)}


KERNELS = (TritonAdd(),)
