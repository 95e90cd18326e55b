"""INT8 codes to packed 4-bit ones: one tile per program, the transform as a product of integers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import random_u16
from jetfire.kernels_triton.groups import BYTES, GROUP, MOST, signed_hadamard
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_tile,
    tile_grid,
)

STREAM_PACKING = tl.constexpr(4)  # as in jetfire.reference.philox


@triton.jit
def hadamard_pack_kernel(
    q_ptr,
    packed_ptr,
    steps_ptr,
    seed_ptr,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    GROUPS: tl.constexpr = TILE_M * TILE_N // GROUP
    row0, col0 = grid_origin(TILE_M, TILE_N)
    q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    t = tl.dot(tl.reshape(q, (GROUPS, GROUP)), signed_hadamard())
    steps = (tl.max(tl.abs(t), 1) + (GROUP - 1)) // GROUP
    widths = tl.maximum(steps * GROUP, 1).to(tl.float32)  # of zeros the codes are 0 anyway
    multiplier = tl.div_rn(tl.full(widths.shape, MOST, tl.float32), widths)
    bits = random_u16(tl.load(seed_ptr), row0, col0, TILE_M, TILE_N, STREAM_PACKING)
    bits = tl.reshape(bits, t.shape).to(tl.float32)
    # bits·2^-16 is exact, so this rounds as p + u does.
    p = tl.fma(bits, 1.52587890625e-05, t.to(tl.float32) * multiplier[:, None])
    codes = tl.floor(tl.maximum(p, -MOST)).to(tl.int32)
    low, high = tl.split(tl.reshape(codes, (TILE_M, TILE_N // 2, 2)))
    packed = ((low & 15) | (high << 4)).to(tl.int8)
    across = tl.cdiv(N, GROUP)
    wide = across * BYTES
    store_tile(packed_ptr, packed, row0, col0 // 2, M, wide, wide)
    steps = tl.reshape(steps, (TILE_M, TILE_N // GROUP)).to(tl.int8)
    store_tile(steps_ptr, steps, row0, col0 // GROUP, M, across, across)


class TritonHadamardPack(TileKernel):
    op = "hadamard_pack"

    def side(self, problem: Any) -> int:
        """Return a group's columns; a tile's rows may be as few."""
        return GROUP.value

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return a tile of whose elements a thread has 32."""
        return TileConfig(32, 128, 4)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        return (Launch(hadamard_pack_kernel, grid, problem, config, **EXACT),)


KERNELS = (TritonHadamardPack(),)
