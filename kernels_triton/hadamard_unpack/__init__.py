"""Packed 4-bit codes to INT8 ones of the transpose: one tile per program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import (
    block_reduce_amax,
    block_scales,
    random_u16,
    round_to_codes,
    spread,
)
from jetfire.kernels_triton.groups import BYTES, GROUP, MOST, signed_hadamard
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TileConfig,
    TileKernel,
    grid_origin,
    load_tile,
    store_quantised,
    tile_grid,
)

STREAM_UNPACKING = tl.constexpr(5)  # as in jetfire.reference.philox


@triton.jit
def hadamard_unpack_kernel(
    packed_ptr,
    steps_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    packed_stride,
    steps_stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ACROSS: tl.constexpr = TILE_N // GROUP
    row0, col0 = grid_origin(TILE_M, TILE_N)
    groups, group0 = tl.cdiv(N, GROUP), col0 // GROUP
    q = load_tile(
        packed_ptr, row0, col0 // 2, M, groups * BYTES, packed_stride, TILE_M, TILE_N // 2
    )
    low, high = (q.to(tl.int32) << 28) >> 28, q.to(tl.int32) >> 4
    codes = tl.reshape(tl.join(low, high).to(tl.int8), (TILE_M * ACROSS, GROUP))
    steps = load_tile(steps_ptr, row0, group0, M, groups, steps_stride, TILE_M, ACROSS)
    sums = tl.reshape(tl.dot(codes, tl.trans(signed_hadamard())), (TILE_M, ACROSS, GROUP))
    integers = tl.reshape(sums * steps.to(tl.int32)[:, :, None], (TILE_M, TILE_N))
    # A group that ends beyond the matrix holds noise there.
    integers = tl.where((col0 + tl.arange(0, TILE_N) < N)[None, :], integers, 0)
    scale = load_tile(
        scale_ptr,
        row0 // BLOCK,
        col0 // BLOCK,
        tl.cdiv(M, BLOCK),
        tl.cdiv(N, BLOCK),
        scale_stride,
        TILE_M // BLOCK,
        TILE_N // BLOCK,
    )
    unit = tl.div_rn(scale, tl.full(scale.shape, MOST, tl.float32))
    x = integers.to(tl.float32) * spread(unit, BLOCK)
    scale, multiplier = block_scales(block_reduce_amax(x, BLOCK))
    bits = random_u16(tl.load(seed_ptr), row0, col0, TILE_M, TILE_N, STREAM_UNPACKING)
    # As `tile_codes`, by another stream: the gradient that this multiplies may have the same seed.
    p = tl.fma(bits.to(tl.float32), 1.52587890625e-05, x * spread(multiplier, BLOCK))
    q = round_to_codes(tl.maximum(p, -127.0), multiplier, BLOCK, True)
    store_quantised(q, scale, None, None, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, "qt")


class TritonHadamardUnpack(TileKernel):
    op = "hadamard_unpack"

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return a tile of whose elements a thread has 32, as quantising ones do."""
        return TileConfig(128, 128, 16) if problem.block == 128 else TileConfig(64, 128, 8)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        return (Launch(hadamard_unpack_kernel, grid, problem, config, **EXACT),)


KERNELS = (TritonHadamardUnpack(),)
