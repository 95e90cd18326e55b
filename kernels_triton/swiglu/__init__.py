"""SwiGLU's silu(gate)·up and its gradients on INT8 blocks: one tile per program, one pass.

As in gelu, what depends on the gate alone is tabulated over the codes of each of its blocks and
looked up: silu(s·q)/s, and for the gradients silu'(s·q) beside it, one LDS of 64 bits for both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.problem import written_block
from jetfire.kernels_triton.blocked import (
    UNIT,
    as_tile,
    block_max,
    by_code,
    deal,
    every_code,
    faults,
    in_units,
    limited,
    load_at,
    look_up,
    places,
    random_128,
    spread_blocks,
    table_of,
    tile_blocks,
)
from jetfire.kernels_triton.codes import (
    codes_nearest,
    codes_stochastic,
    codes_to_floats,
    exp2_fast,
    reciprocal_fast,
)
from jetfire.kernels_triton.common import LOG2E, STREAM_ROUNDING, TINY
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    TILE_SPACE,
    RegisterConfig,
    TileKernel,
    register_limit,
    store_tile,
    tile_count,
    tile_origin,
)

STREAM_SECOND = tl.constexpr(3)  # as jetfire.reference.philox


@triton.jit
def sigmoid(q, s):
    """Return σ(s·q), 0 where it is below 2^-100: 127 over a block's largest value stays finite."""
    gate = reciprocal_fast(1.0 + exp2_fast(q * (s * -LOG2E)))
    return tl.where(gate < TINY, 0.0, gate)


@triton.jit
def look_up_pair(first, second, q, table, EACH: tl.constexpr):
    """Look two tables up for every element, as `look_up` does one: one LDS of 64 bits for both."""
    low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
    found = look_up(low | (high << 32), q, table, EACH)
    low, high = found.to(tl.uint32), (found >> 32).to(tl.uint32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def dealt_tile(
    N,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the places of this program's tile, of its dealt rows and columns, of its blocks."""
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    COUNT: tl.constexpr = TILE_M * TILE_N // (OUT_BLOCK * OUT_BLOCK)
    dealt = tl.arange(0, TILE_M * TILE_N // WIDTH)
    row, col = places(row0, col0, dealt, TILE_N, COUNT, H, OUT_BLOCK, WIDTH)
    block_row, block_col = tile_blocks(row0, col0, TILE_M, TILE_N, BLOCK, EACH)
    cols = col[:, None] + tl.arange(0, WIDTH)[None, :]
    return row0, col0, row[:, None], cols, block_row, block_col


@triton.jit
def store_codes(
    value,
    first,
    second,
    bad,
    seed_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STREAM: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Quantise value·first·second, value [ROWS, WIDTH] and factors by block; write as LAYOUT says.

    bad is NaN for blocks that hold NaN, 0 for the others.
    """
    COUNT: tl.constexpr = TILE_M * TILE_N // (BLOCK * BLOCK)
    row0, col0, rows, cols, block_row, block_col = dealt_tile(
        N, TILE_M, TILE_N, BLOCK, BLOCK, 1, H, WIDTH
    )
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    inside = (rows < M) & (cols < N)
    within = (block_row < blocks_m) & (block_col < blocks_n)
    amax = block_max(value, H, BLOCK)
    # The smaller factor first: what overflows then is too large, and 0 stays 0.
    whole = amax * tl.minimum(first, second) * tl.maximum(first, second) + bad
    usable = (whole >= TINY) & (whole < float("inf"))
    zero = whole < TINY
    scale = tl.where(usable, whole / 127.0, tl.where(zero, 0.0, float("nan")))
    # Within 2 units of 127/amax; stochastic rounding wants a product below 127.
    most = 126.99997 if STOCHASTIC else 127.0
    multiplier = tl.where(usable, most / tl.where(usable, amax, 127.0), 0.0)
    wide = spread_blocks(multiplier, H, BLOCK, WIDTH)
    if STOCHASTIC:
        draws = random_128(tl.load(seed_ptr), row0, col0, TILE_N, COUNT, H, BLOCK, WIDTH, STREAM)
        q = codes_stochastic(value, wide, draws)
    else:
        q = codes_nearest(value, wide)
    if LAYOUT != "qt":
        tl.store(q_ptr + (rows.to(tl.int64) * stride + cols), q, mask=inside)
        at = block_row.to(tl.int64) * scale_stride + block_col
        tl.store(scale_ptr + at, scale, mask=within)
    if LAYOUT != "q":
        store_tile(qt_ptr, tl.trans(as_tile(q, TILE_N, H, BLOCK)), col0, row0, N, M, M)
        at = block_col.to(tl.int64) * blocks_m + block_row
        tl.store(scale_t_ptr + at, scale, mask=within)


@triton.jit
def forward_kernel(
    gate_ptr,
    gate_scale_ptr,
    up_ptr,
    up_scale_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    gate_stride,
    gate_scale_stride,
    up_stride,
    up_scale_stride,
    q_stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    EACH: tl.constexpr = 1 if BLOCK == OUT_BLOCK else 32
    row0, col0, rows, cols, block_row, block_col = dealt_tile(
        N, TILE_M, TILE_N, BLOCK, OUT_BLOCK, EACH, H, WIDTH
    )
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    gate = load_at(gate_ptr, rows, cols, M, N, gate_stride)
    up = load_at(up_ptr, rows, cols, M, N, up_stride)
    gate_scale = load_at(
        gate_scale_ptr, block_row, block_col, blocks_m, blocks_n, gate_scale_stride
    )
    up_scale = load_at(up_scale_ptr, block_row, block_col, blocks_m, blocks_n, up_scale_stride)
    code = every_code(gate_scale.shape[0], EACH)
    s = by_code(limited(gate_scale), EACH)
    up = codes_to_floats(up)
    silu = code * sigmoid(code, s)
    if BLOCK != OUT_BLOCK:
        silu = in_units(silu, gate_scale, up_scale)
    table = table_of(TILE_M, TILE_N, BLOCK, OUT_BLOCK, H, WIDTH)
    value = up * look_up(silu, gate, table, EACH)
    if BLOCK == OUT_BLOCK:
        bad = gate_scale * 0.0 + up_scale * 0.0
    else:
        bad = faults(
            gate_scale_ptr, row0, col0, M, N, gate_scale_stride, TILE_M, TILE_N, BLOCK, OUT_BLOCK
        )
        bad += faults(
            up_scale_ptr, row0, col0, M, N, up_scale_stride, TILE_M, TILE_N, BLOCK, OUT_BLOCK
        )
        gate_scale, up_scale = UNIT, 1.0
    store_codes(
        value,
        gate_scale,
        up_scale,
        bad,
        seed_ptr,
        q_ptr,
        scale_ptr,
        qt_ptr,
        scale_t_ptr,
        M,
        N,
        q_stride,
        scale_stride,
        TILE_M,
        TILE_N,
        OUT_BLOCK,
        LAYOUT,
        STOCHASTIC,
        STREAM_ROUNDING,
        H,
        WIDTH,
    )


@triton.jit
def backward_kernel(
    gate_ptr,
    gate_scale_ptr,
    up_ptr,
    up_scale_ptr,
    dy_ptr,
    dy_scale_ptr,
    dgate_ptr,
    dgate_scale_ptr,
    dgate_t_ptr,
    dgate_scale_t_ptr,
    dup_ptr,
    dup_scale_ptr,
    dup_t_ptr,
    dup_scale_t_ptr,
    seed_ptr,
    M,
    N,
    gate_stride,
    gate_scale_stride,
    up_stride,
    up_scale_stride,
    dy_stride,
    dy_scale_stride,
    dgate_stride,
    dgate_scale_stride,
    dup_stride,
    dup_scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    EACH: tl.constexpr = 1 if BLOCK == OUT_BLOCK else 32
    row0, col0, rows, cols, block_row, block_col = dealt_tile(
        N, TILE_M, TILE_N, BLOCK, OUT_BLOCK, EACH, H, WIDTH
    )
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    gate = load_at(gate_ptr, rows, cols, M, N, gate_stride)
    up = load_at(up_ptr, rows, cols, M, N, up_stride)
    dy = load_at(dy_ptr, rows, cols, M, N, dy_stride)
    gate_scale = load_at(
        gate_scale_ptr, block_row, block_col, blocks_m, blocks_n, gate_scale_stride
    )
    up_scale = load_at(up_scale_ptr, block_row, block_col, blocks_m, blocks_n, up_scale_stride)
    dy_scale = load_at(dy_scale_ptr, block_row, block_col, blocks_m, blocks_n, dy_scale_stride)
    code = every_code(gate_scale.shape[0], EACH)
    s = by_code(limited(gate_scale), EACH)
    sigma = sigmoid(code, s)
    slope = sigma * tl.fma(1.0 - sigma, code * s, 1.0)
    silu = code * sigma
    if BLOCK != OUT_BLOCK:
        silu = in_units(silu, dy_scale, gate_scale)
        slope = in_units(slope, dy_scale, up_scale)
    table = table_of(TILE_M, TILE_N, BLOCK, OUT_BLOCK, H, WIDTH)
    of_up, of_gate = look_up_pair(silu, slope, gate, table, EACH)
    wide = codes_to_floats(dy)
    dup, dgate = wide * of_up, wide * codes_to_floats(up) * of_gate
    if BLOCK == OUT_BLOCK:
        bad = gate_scale * 0.0 + dy_scale * 0.0
        bad_up = up_scale * 0.0
    else:
        bad = faults(
            gate_scale_ptr, row0, col0, M, N, gate_scale_stride, TILE_M, TILE_N, BLOCK, OUT_BLOCK
        )
        bad += faults(
            dy_scale_ptr, row0, col0, M, N, dy_scale_stride, TILE_M, TILE_N, BLOCK, OUT_BLOCK
        )
        bad_up = faults(
            up_scale_ptr, row0, col0, M, N, up_scale_stride, TILE_M, TILE_N, BLOCK, OUT_BLOCK
        )
        dy_scale, gate_scale, up_scale = UNIT, 1.0, 1.0
    store_codes(
        dup,
        dy_scale,
        gate_scale,
        bad,
        seed_ptr,
        dup_ptr,
        dup_scale_ptr,
        dup_t_ptr,
        dup_scale_t_ptr,
        M,
        N,
        dup_stride,
        dup_scale_stride,
        TILE_M,
        TILE_N,
        OUT_BLOCK,
        LAYOUT,
        STOCHASTIC,
        STREAM_SECOND,
        H,
        WIDTH,
    )
    store_codes(
        dgate,
        dy_scale,
        up_scale,
        bad + bad_up,
        seed_ptr,
        dgate_ptr,
        dgate_scale_ptr,
        dgate_t_ptr,
        dgate_scale_t_ptr,
        M,
        N,
        dgate_stride,
        dgate_scale_stride,
        TILE_M,
        TILE_N,
        OUT_BLOCK,
        LAYOUT,
        STOCHASTIC,
        STREAM_ROUNDING,
        H,
        WIDTH,
    )


class TritonSwiglu(TileKernel):
    op = "swiglu"
    Config = RegisterConfig
    # One warp alone makes Triton look a table up by eight shuffles in place of one LDS.
    choices: ClassVar = {
        **TILE_SPACE,
        "warps": (2, 4, 8, 16, 32),
        "registers": (64, 80, 96, 128, 255),
    }
    side = staticmethod(written_block)

    def default(self, problem: Any, device: Device) -> RegisterConfig:
        """Return gelu's tile; both gradients of 64 elements per thread would take 246 registers.

        Forward, ptxas takes 96 or 128 registers where 88 or 96 are enough to spill nothing.
        """
        block = problem.out_block
        tile_n = max(block, 4096 // block)
        if problem.mode == "bwd":
            return RegisterConfig(block, tile_n, 16 if block == 128 else 4)
        limit = 255
        if problem.layout == "q" and problem.block == block < 128:
            limit = 96 if problem.rounding == "stochastic" else 88
        return RegisterConfig(block, tile_n, 8 if block == 128 else 2, limit)

    def launches(self, problem: Any, config: RegisterConfig, device: Device) -> tuple[Launch, ...]:
        kernel = backward_kernel if problem.mode == "bwd" else forward_kernel
        given = {**deal(problem.out_block, config), **EXACT, **register_limit(config)}
        grid = (tile_count(problem.m, problem.n, config),)
        return (Launch(kernel, grid, problem, config, **given),)


KERNELS = (TritonSwiglu(),)
