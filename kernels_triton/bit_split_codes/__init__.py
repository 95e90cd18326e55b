"""Bit splitting of codes: the largest scale, then one pass over them, whole rows per program."""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, blocks_of, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.common import STREAM_ROUNDING, random_words
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.parts import codes_nearest, codes_split, largest_kernel
from jetfire.kernels_triton.tiles import (
    TileConfig,
    device_reason,
    grid_reason,
    load_tile,
    power_reason,
    share_reason,
    store_tile,
    warps_reason,
)
from jetfire.reference.bit_split import MOST
from jetfire.reference.bit_split_codes import MOST_CODE

# Of the scales, a thousandth of the codes, a program takes tiles of so many.
_SCALES_M, _SCALES_N = 16, 128


@triton.jit
def load_code_pairs(
    q_ptr, row0, pair0, M, PAIRS, stride, R: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr
):
    """Load the even and the odd codes of R rows of P pairs: fp32 [R, P] each, 0 beyond M×PAIRS.

    With TOGETHER a pair lies at a multiple of its size, and is loaded as one integer.
    """
    if TOGETHER:
        both = q_ptr.to(tl.pointer_type(tl.int16))
        pairs = load_tile(both, row0, pair0, M, PAIRS, stride // 2, R, P).to(tl.int32)
        return ((pairs << 24) >> 24).to(tl.float32), (pairs >> 8).to(tl.float32)
    else:
        cols = 2 * pair0 + 2 * tl.arange(0, P)
        rows = row0 + tl.arange(0, R)
        at = q_ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
        inside = (rows < M)[:, None] & (cols < 2 * PAIRS)[None, :]
        even, odd = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def load_ratios(scale_ptr, row0, col0, N, stride, inverse, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Return scale/unit of each pair of a row's COLS columns from col0 on, [1, COLS/2]."""
    blocks = col0 // BLOCK + tl.arange(0, COLS // BLOCK)
    at = scale_ptr + ((row0 // BLOCK).to(tl.int64) * stride + blocks)
    ratios = tl.load(at, mask=blocks < tl.cdiv(N, BLOCK), other=0.0) * inverse
    wide = tl.broadcast_to(ratios[:, None], (COLS // BLOCK, BLOCK // 2))
    return tl.reshape(wide, (1, COLS // 2))


@triton.jit
def split_codes_kernel(
    q_ptr,
    scale_ptr,
    seed_ptr,
    unit_ptr,
    parts_ptr,
    squares_ptr,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row0 = tl.program_id(0) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    unit = tl.load(unit_ptr)
    usable = unit > 0
    seed = tl.load(seed_ptr) if BITS == 8 else 0
    inverse = tl.div_rn(1.0, tl.where(usable, unit, 1.0))
    half: tl.constexpr = TILE_N // 2
    # Where the unit is 0 or NaN, as many pairs as are loaded: every code is 0.
    pairs = tl.where(usable, N // 2, 0)
    kept = tl.where(unit == unit, -1, 0)  # the row whose first code must be 1
    low_ptr = parts_ptr + tl.cast(M, tl.int64) * (N // 2)
    high_squares = tl.zeros((TILE_M, half), tl.int32)
    low_squares = tl.zeros((TILE_M, half), tl.int32)
    for pair0 in range(0, N // 2, half):
        even, odd = load_code_pairs(q_ptr, row0, pair0, M, pairs, stride, TILE_M, half, TOGETHER)
        ratios = load_ratios(
            scale_ptr, row0, 2 * pair0, 2 * pairs, scale_stride, inverse, TILE_N, BLOCK
        )
        even, odd = even * ratios, odd * ratios
        if BITS == 8:
            words = random_words(seed, row0, 2 * pair0, TILE_M, TILE_N, STREAM_ROUNDING)
            words = tl.reshape(words, (TILE_M, half))
            high, low, squares, others = codes_split(even, odd, words, VECTORS)
            low_squares += others
            store_tile(low_ptr, low, row0, pair0, M, N // 2, N // 2)
        else:
            high, squares = codes_nearest(even, odd, VECTORS)
        high_squares += squares
        if (kept == row0) & (pair0 == 0):
            first = (rows == kept)[:, None] & (tl.arange(0, half) == 0)[None, :]
            high = tl.where(first, 1, high)
        store_tile(parts_ptr, high, row0, pair0, M, N // 2, N // 2)
    total = tl.sum(high_squares, 1) + tl.where(rows == kept, 1, 0)
    tl.store(squares_ptr + rows, total, mask=rows < M)
    if BITS == 8:
        tl.store(squares_ptr + M + rows, tl.sum(low_squares, 1), mask=rows < M)


class TritonBitSplitCodes(TritonKernel):
    """A program of `warps` warps takes `tile_m` whole rows, `tile_n` columns at a time."""

    op = "bit_split_codes"
    Config = TileConfig
    choices: ClassVar = {
        "tile_m": (1, 2, 4, 8, 16, 32),
        "tile_n": (128, 256, 512, 1024, 2048),
        "warps": (1, 2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        if problem.sums:
            return "sums=True: expected False"
        rows, columns = "a power of two of at most 32", "a power of two of at least 128"
        return (
            device_reason(device)
            or power_reason(config, "tile_m", expected=rows, most=32)
            or power_reason(config, "tile_n", expected=columns, least=128)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 8, 64)
            or grid_reason(ceil_div(problem.m, config.tile_m))
        )

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return the widest tile of which at most an eighth of the columns is idle."""
        widths = (t for t in (1024, 512, 256) if -problem.n % t <= problem.n // 8)
        tile_n = next(widths, 128)
        return TileConfig(2048 // tile_n, tile_n)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        down, across = blocks_of(problem.m, problem.n, problem.block)
        tiles = ceil_div(down, _SCALES_M) * ceil_div(across, _SCALES_N)
        programs = min(tiles, device.sms)
        of_scales = {"M": down, "N": across, "TILE_M": _SCALES_M, "TILE_N": _SCALES_N}
        given = {"most": MOST[problem.bits] / MOST_CODE, "tiles": tiles, "programs": programs}
        bands = (ceil_div(problem.m, config.tile_m),)
        scales = {"x_ptr": "scale", "stride": "scale"}
        return (
            Launch(largest_kernel, (programs,), problem, config, scales, **of_scales, **given),
            Launch(split_codes_kernel, bands, problem, config, **EXACT),
        )

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        q = inputs["q"]
        tensors = {**inputs, **outputs, "counter": counters(q.device, 2)}
        largest, split = self.prepared(problem, config, inputs)
        largest(tensors)
        together = q.stride(0) % 2 == 0 and q.data_ptr() % 2 == 0
        vectors = (problem.n | q.stride(0) | q.data_ptr()) % 16 == 0
        split(tensors, TOGETHER=together, VECTORS=vectors)


KERNELS = (TritonBitSplitCodes(),)
