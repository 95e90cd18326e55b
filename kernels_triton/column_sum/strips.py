"""Column sums of a quantised tensor without its transpose: a strip of rows per program.

A program's threads lie beside and beneath each other, each along the rows of one block, so that a
block's sum is a thread's own. The last program of a tile's columns to arrive adds up the strips'
sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    power_reason,
    share_reason,
    warps_reason,
)


@dataclass(frozen=True)
class StripsConfig(Config):
    """A program of `warps` warps adds up `tile_n` columns of `blocks` blocks under each other.

    It loads `rows` rows of each block at a time.
    """

    tile_n: int = 256
    blocks: int = 8
    rows: int = 32
    warps: int = 4


@triton.jit
def strip_sums_kernel(
    q_ptr,
    scale_ptr,
    sums_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    stride,
    scale_stride,
    strips,
    TILE_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write Σ code·scale of TILE_N columns: int32 within a block, fp32 across, in a fixed order."""
    ACROSS: tl.constexpr = TILE_N // BLOCK
    tiles = tl.cdiv(N, TILE_N)
    strip, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    down = strip * BLOCKS + tl.arange(0, BLOCKS)
    across = tile * ACROSS + tl.arange(0, ACROSS)
    cols = across[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    rows = down * BLOCK
    at = q_ptr + (rows.to(tl.int64)[:, None, None] * stride + cols[None, :, :])
    codes = tl.zeros((BLOCKS, ACROSS, BLOCK), tl.int32)
    for row in range(0, BLOCK, ROWS):
        for i in tl.static_range(ROWS):
            inside = (rows + (row + i) < M)[:, None, None] & (cols < N)[None, :, :]
            codes += tl.load(at, mask=inside, other=0).to(tl.int32)
            at += stride
    within = (down < tl.cdiv(M, BLOCK))[:, None] & (across < tl.cdiv(N, BLOCK))[None, :]
    scales = scale_ptr + (down.to(tl.int64)[:, None] * scale_stride + across[None, :])
    scale = tl.load(scales, mask=within, other=0.0)
    sums = tl.sum(codes.to(tl.float32) * scale[:, :, None], 0)
    tl.store(partial_ptr + (strip.to(tl.int64) * N + cols), sums, mask=cols < N)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == strips - 1:
        tl.store(counter_ptr + tile, 0)
        every = tile * TILE_N + tl.arange(0, TILE_N)
        total = tl.zeros((PARTS, TILE_N), tl.float32)
        for first in range(0, strips, PARTS):
            part = first + tl.arange(0, PARTS)
            place = part.to(tl.int64)[:, None] * N + every[None, :]
            there = (part < strips)[:, None] & (every < N)[None, :]
            total += tl.load(partial_ptr + place, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(sums_ptr + every, tl.sum(total, 0), mask=every < N)


class TritonColumnSumStrips(TritonKernel):
    op = "column_sum"
    name = "strips"
    Config = StripsConfig
    choices: ClassVar = {
        "tile_n": (64, 128, 256, 512, 1024),
        "blocks": (1, 2, 4, 8, 16, 32),
        "rows": (4, 8, 16, 32),
        "warps": (1, 2, 4, 8),
    }

    def legal(self, problem: Any, config: StripsConfig, device: Device) -> str | None:
        if problem.layout != "q":
            return f"layout={problem.layout}: expected q"
        block = problem.block
        columns = f"a power of two, a multiple of block={block}"
        rows = f"a power of two, at most block={block}"
        return (
            device_reason(device)
            or power_reason(config, "tile_n", expected=columns, multiple=block)
            or power_reason(config, "blocks", expected="a power of two")
            or power_reason(config, "rows", expected=rows, most=block)
            or warps_reason(config)
            or share_reason(config.tile_n * config.blocks, config, 1, 16, "columns")
            or grid_reason(_strips(problem, config) * _tiles(problem, config), of="programs")
        )

    def default(self, problem: Any, device: Device) -> StripsConfig:
        """Return 16 columns per thread, and fewer warps where that makes fewer programs than SMs.

        Codes that no vectors hold are a register each: fewer rows are loaded at a time.
        """
        rows = 32 if problem.n % 16 == 0 else 4
        most = problem.m * problem.n // (512 * problem.block * device.sms)
        warps = next((warps for warps in (4, 2) if warps <= most), 1)
        tile_n = max(problem.block, 128)
        return StripsConfig(tile_n, 512 * warps // tile_n, rows, warps)

    def launches(self, problem: Any, config: StripsConfig, device: Device) -> tuple[Launch, ...]:
        strips = _strips(problem, config)
        # As many at a time as make 64 numbers per thread.
        most = 64 * 32 * config.warps // config.tile_n
        parts = min(triton.next_power_of_2(strips), most)
        grid, given = (strips * _tiles(problem, config),), {"strips": strips, "PARTS": parts}
        of = {"scale_stride": "scale"}
        return (Launch(strip_sums_kernel, grid, problem, config, of, **given),)

    def tensors(
        self, problem: Any, config: StripsConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        device, strips = inputs["q"].device, _strips(problem, config)
        partial = torch.empty((strips, problem.n), dtype=torch.float32, device=device)
        counter = counters(device, _tiles(problem, config))
        return {**inputs, **outputs, "partial": partial, "counter": counter}


def _strips(problem: Any, config: StripsConfig) -> int:
    return ceil_div(problem.m, config.blocks * problem.block)


def _tiles(problem: Any, config: StripsConfig) -> int:
    return ceil_div(problem.n, config.tile_n)
