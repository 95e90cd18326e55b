"""Column sums of a quantised tensor: a few rows of its transpose per program, along all of m."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.common import INTERPRETED
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    load_tile,
    power_reason,
    share_reason,
    warps_reason,
)

# The sum of four codes, in the first of four places.
_SUM4 = tl.constexpr("""{
dp4a.s32.s32 $0, $4, 0x01010101, 0;
mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
}""")


@dataclass(frozen=True)
class ColumnSumConfig(Config):
    """A program of `warps` warps adds up `tile_n` columns, `tile_m` rows of them at a time."""

    tile_m: int = 2048
    tile_n: int = 4
    warps: int = 4


@triton.jit
def widen(q, VECTORS: tl.constexpr):
    """Return int32 that have the same sum over a block as the codes.

    With VECTORS each thread holds whole neighbourhoods of four codes; otherwise its next four may
    be of four blocks.
    """
    if INTERPRETED or not VECTORS:
        return q.to(tl.int32)
    return tl.inline_asm_elementwise(
        _SUM4, "=r,=r,=r,=r,r", [q], dtype=tl.int32, is_pure=True, pack=4
    )


@triton.jit
def column_sum_kernel(
    qt_ptr,
    scale_t_ptr,
    sums_ptr,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Write Σ code·scale of TILE_N rows of qt: int32 within a block, fp32 across, in a fixed order.

    All the rows are in one row of blocks.
    """
    row0 = tl.program_id(0) * TILE_N
    blocks: tl.constexpr = TILE_M // BLOCK
    sums = tl.zeros((TILE_N, blocks), tl.float32)
    for col0 in range(0, M, TILE_M):
        q = load_tile(qt_ptr, row0, col0, N, M, stride, TILE_N, TILE_M)
        scale = load_tile(
            scale_t_ptr,
            row0 // BLOCK,
            col0 // BLOCK,
            tl.cdiv(N, BLOCK),
            tl.cdiv(M, BLOCK),
            scale_stride,
            1,
            blocks,
        )
        in_block = tl.sum(tl.reshape(widen(q, VECTORS), (TILE_N, blocks, BLOCK)), 2)
        sums += in_block.to(tl.float32) * scale
    rows = row0 + tl.arange(0, TILE_N)
    tl.store(sums_ptr + rows, tl.sum(sums, 1), mask=rows < N)


class TritonColumnSum(TritonKernel):
    op = "column_sum"
    Config = ColumnSumConfig
    choices: ClassVar = {
        "tile_m": (512, 1024, 2048, 4096, 8192),
        "tile_n": (1, 2, 4, 8, 16, 32),
        "warps": (1, 2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: ColumnSumConfig, device: Device) -> str | None:
        block = problem.block
        expected = f"a power of two, a multiple of block={block}"
        reason = device_reason(device) or power_reason(
            config, "tile_m", expected=expected, multiple=block
        )
        if reason is None and block % config.tile_n:
            return f"tile_n={config.tile_n}: expected a divisor of block={block}"
        return (
            reason
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 1, 128, "codes")
            or grid_reason(ceil_div(problem.n, config.tile_n), "a larger tile_n", "programs")
        )

    def default(self, problem: Any, device: Device) -> ColumnSumConfig:
        """Return a tile that makes 512 programs or more, where n allows.

        That is about four per SM of an H200.
        """
        tile_m = min(2048, max(problem.block, triton.next_power_of_2(problem.m)))
        # Rows that do not begin at 16 bytes are loaded code by code: a register each.
        choices = (8, 4, 2) if problem.m % 16 == 0 else (2,)
        tile_n = next((rows for rows in choices if problem.n >= 512 * rows), 1)
        return ColumnSumConfig(tile_m, tile_n, max(1, min(4, tile_m // 512)))

    def launches(self, problem: Any, config: ColumnSumConfig, device: Device) -> tuple[Launch, ...]:
        grid, rows_of = (ceil_div(problem.n, config.tile_n),), {"scale_stride": "scale_t"}
        return (Launch(column_sum_kernel, grid, problem, config, rows_of),)

    def launch(
        self, problem: Any, config: ColumnSumConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        qt = inputs["qt"]
        per_thread = config.tile_m * config.tile_n // (32 * config.warps)
        aligned = (problem.m | qt.stride(0) | qt.data_ptr()) % 16 == 0
        (launch,) = self.prepared(problem, config, inputs)
        launch({**inputs, **outputs}, VECTORS=aligned and per_thread >= 16)


KERNELS = (TritonColumnSum(),)
