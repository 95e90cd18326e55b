"""A measured step: each program squares a tile of the rows that are read; the last adds up all."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.halves import widen
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    TileConfig,
    device_reason,
    grid_reason,
    power_reason,
    share_reason,
    warps_reason,
)
from jetfire.ops.measured_step import LEAST_TILE
from jetfire.reference.measured_step import LEAST, OF_RMS, rows_read


@triton.jit
def step_kernel(
    x_ptr,
    x_scale_ptr,
    partial_ptr,
    step_ptr,
    counter_ptr,
    N,
    stride,
    x_scale_stride,
    count,
    first,
    apart,
    tiles,
    share,
    least,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES: tl.constexpr,
):
    """Write max(share·√Σx², least) over `count` rows that lie `apart`, in a fixed order."""
    across = tl.cdiv(N, TILE_N)
    own = tl.program_id(0)
    place = own // across * TILE_M + tl.arange(0, TILE_M)
    rows = (first + place.to(tl.int64) * apart)[:, None]
    col0 = own % across * TILE_N
    cols = col0 + tl.arange(0, TILE_N)
    inside = (place < count)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows * stride + cols[None, :], mask=inside, other=0)
    if CODES:
        blocks: tl.constexpr = TILE_N // BLOCK
        places = col0 // BLOCK + tl.arange(0, blocks)
        there = (place < count)[:, None] & (places < tl.cdiv(N, BLOCK))[None, :]
        scales = x_scale_ptr + rows // BLOCK * x_scale_stride + places[None, :]
        scale = tl.load(scales, mask=there, other=0.0)
        q = tl.reshape(x.to(tl.int32), (TILE_M, blocks, BLOCK))
        squares = tl.sum(q * q, 2).to(tl.float32) * scale * scale
    else:
        wide = widen(x)
        squares = wide * wide
    tl.store(partial_ptr + own, tl.sum(tl.sum(squares, 1), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tiles - 1:
        tl.store(counter_ptr, 0)
        total = tl.zeros((1024,), tl.float32)
        for start in range(0, tiles, 1024):
            tile = start + tl.arange(0, 1024)
            added = tile < tiles
            total += tl.load(partial_ptr + tile, mask=added, other=0.0, cache_modifier=".cg")
        step = share * tl.sqrt_rn(tl.sum(total, 0))
        tl.store(step_ptr, tl.where(step < least, least, step))


class TritonMeasuredStep(TritonKernel):
    op = "measured_step"
    Config = TileConfig
    choices: ClassVar = {
        "tile_m": (1, 2, 4, 8),
        "tile_n": (256, 512, 1024, 2048),
        "warps": (1, 2, 4, 8),
    }

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        rows, columns = "a power of two of at most 8", f"a power of two of at least {LEAST_TILE}"
        return (
            device_reason(device)
            or power_reason(config, "tile_m", expected=rows, most=8)
            or power_reason(config, "tile_n", expected=columns, least=LEAST_TILE)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 1, 64)
            or grid_reason(_tiles(problem, config))
        )

    def default(self, problem: Any, device: Device) -> TileConfig:
        return TileConfig(4, 1024 if problem.n > 512 else LEAST_TILE, 4)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        read, count = rows_read(problem.m), _count(problem)
        tiles = _tiles(problem, config)
        given = {
            "count": count,
            "first": read.start,
            "apart": read.step,
            "tiles": tiles,
            "share": OF_RMS / (count * problem.n) ** 0.5,
            "least": LEAST,
            "CODES": problem.dtype == "int8",
        }
        return (Launch(step_kernel, (tiles,), problem, config, **given),)

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        x = inputs["x"]
        partial = torch.empty(_tiles(problem, config), dtype=torch.float32, device=x.device)
        tensors = {**inputs, **outputs, "partial": partial, "counter": counters(x.device, 1)}
        (launch,) = self.prepared(problem, config, inputs)
        launch(tensors)


def _count(problem: Any) -> int:
    """Return how many rows are read."""
    return len(range(problem.m)[rows_read(problem.m)])


def _tiles(problem: Any, config: TileConfig) -> int:
    return ceil_div(_count(problem), config.tile_m) * ceil_div(problem.n, config.tile_n)


KERNELS = (TritonMeasuredStep(),)
