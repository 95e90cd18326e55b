"""Bit splitting: a pass for the largest magnitude, then one for the codes, whole rows per program.

Only the unit goes from the first pass to the second. The second begins with the last rows: some of
them are still in the L2 cache from the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.common import STREAM_ROUNDING, random_words
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.parts import codes_nearest, codes_split, largest_kernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    grid_reason,
    load_tile,
    power_reason,
    share_reason,
    store_tile,
    tile_count,
    warps_reason,
)
from jetfire.reference.bit_split import MOST


@dataclass(frozen=True)
class BitSplitConfig(Config):
    """A program of `warps` warps takes `tile_m` whole rows, `tile_n` columns at a time.

    The first pass runs `waves` programs of as many warps on each multiprocessor.
    """

    tile_m: int = 4
    tile_n: int = 512
    warps: int = 4
    waves: int = 8


@triton.jit
def load_pairs(
    x_ptr, row0, pair0, M, PAIRS, stride, R: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr
):
    """Load the even and the odd elements of R rows of P pairs: fp32 [R, P] each, 0 beyond M×PAIRS.

    With TOGETHER a pair lies at a multiple of its size, and is loaded as one integer. The tile then
    has the threads of the codes' bytes, which a tile of elements would not.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if not TOGETHER:
        cols = 2 * pair0 + 2 * tl.arange(0, P)
        rows = row0 + tl.arange(0, R)
        at = x_ptr + (rows.to(tl.int64)[:, None] * stride + cols[None, :])
        inside = (rows < M)[:, None] & (cols < 2 * PAIRS)[None, :]
        even, odd = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        return even.to(tl.float32), odd.to(tl.float32)
    elif dtype == tl.float32:
        both = x_ptr.to(tl.pointer_type(tl.int64))
        pairs = load_tile(both, row0, pair0, M, PAIRS, stride // 2, R, P)
        even, odd = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    else:
        both = x_ptr.to(tl.pointer_type(tl.int32))
        pairs = load_tile(both, row0, pair0, M, PAIRS, stride // 2, R, P)
        if dtype == tl.bfloat16:
            even, odd = pairs << 16, pairs & -65536
            return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
        else:
            even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
            even, odd = even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True)
            return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def split_kernel(
    x_ptr,
    seed_ptr,
    unit_ptr,
    q_ptr,
    squares_ptr,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    VECTORS: tl.constexpr,
):
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    unit = tl.load(unit_ptr)
    usable = unit > 0
    seed = tl.load(seed_ptr) if BITS == 8 else 0
    inverse = tl.div_rn(1.0, tl.where(usable, unit, 1.0))
    half: tl.constexpr = TILE_N // 2
    # Where the unit is 0 or NaN, as many pairs as are loaded: every code is 0.
    pairs = tl.where(usable, N // 2, 0)
    kept = tl.where(unit == unit, -1, 0)  # the row whose first code must be 1
    low_ptr = q_ptr + tl.cast(M, tl.int64) * (N // 2)
    high_squares = tl.zeros((TILE_M, half), tl.int32)
    low_squares = tl.zeros((TILE_M, half), tl.int32)
    for pair0 in range(0, N // 2, half):
        even, odd = load_pairs(x_ptr, row0, pair0, M, pairs, stride, TILE_M, half, TOGETHER)
        even, odd = even * inverse, odd * inverse
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
        store_tile(q_ptr, high, row0, pair0, M, N // 2, N // 2)
    total = tl.sum(high_squares, 1) + tl.where(rows == kept, 1, 0)
    tl.store(squares_ptr + rows, total, mask=rows < M)
    if BITS == 8:
        tl.store(squares_ptr + M + rows, tl.sum(low_squares, 1), mask=rows < M)


class TritonBitSplit(TritonKernel):
    op = "bit_split"
    Config = BitSplitConfig
    choices: ClassVar = {
        "tile_m": (1, 2, 4, 8, 16, 32),
        "tile_n": (128, 256, 512, 1024, 2048),
        "warps": (1, 2, 4, 8, 16),
        "waves": (2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: BitSplitConfig, device: Device) -> str | None:
        reason = (
            device_reason(device)
            or power_reason(config, "tile_m", expected="a power of two of at least 1")
            or power_reason(config, "tile_n", expected="a power of two of at least 32", least=32)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 8, 64)
        )
        if reason is None and not 1 <= config.waves <= 64:
            return f"waves={config.waves}: expected 1 to 64"
        return reason or grid_reason(tile_count(problem.m, problem.n, config))

    def default(self, problem: Any, device: Device) -> BitSplitConfig:
        """Return the widest tile of which at most an eighth of the columns is idle."""
        widths = (t for t in (1024, 512, 256) if -problem.n % t <= problem.n // 8)
        tile_n = next(widths, 128)
        return BitSplitConfig(2048 // tile_n, tile_n)

    def launches(self, problem: Any, config: BitSplitConfig, device: Device) -> tuple[Launch, ...]:
        count = tile_count(problem.m, problem.n, config)
        programs = min(count, config.waves * device.sms)
        given = {"most": float(MOST[problem.bits]), "tiles": count, "programs": programs}
        bands = (ceil_div(problem.m, config.tile_m),)
        return (
            Launch(largest_kernel, (programs,), problem, config, **given),
            Launch(split_kernel, bands, problem, config, **EXACT),
        )

    def launch(
        self, problem: Any, config: BitSplitConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        x = inputs["x"]
        tensors = {**inputs, **outputs, "counter": counters(x.device, 2)}
        largest, split = self.prepared(problem, config, inputs)
        largest(tensors)
        together = x.stride(0) % 2 == 0 and x.data_ptr() % (2 * x.element_size()) == 0
        vectors = (problem.n | x.stride(0) | x.data_ptr()) % 16 == 0
        split(tensors, TOGETHER=together, VECTORS=vectors)


KERNELS = (TritonBitSplit(),)
