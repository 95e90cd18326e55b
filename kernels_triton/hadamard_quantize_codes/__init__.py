"""The Hadamard quantiser of codes: a transform is a product of integers; whole rows per program."""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_triton.common import hadamard
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
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
from jetfire.reference.hadamard import factor

# Adding it leaves an integer, rounded as the addition rounds, in a float's low bits.
INTEGER = tl.constexpr(12582912.0)


@triton.jit
def hadamard_quantize_codes_kernel(
    q_ptr,
    scale_ptr,
    step_ptr,
    packed_ptr,
    wide_ptr,
    unit_ptr,
    squares_ptr,
    counter_ptr,
    M,
    N,
    stride,
    scale_stride,
    factor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write the codes of TILE_M rows of one row of blocks; the last program to end the unit."""
    row0 = tl.program_id(0) * TILE_M
    rows = row0 + tl.arange(0, TILE_M)
    step = tl.load(step_ptr)
    inverse = tl.div_rn(factor, step)
    inverse = tl.where((inverse > 0) & (inverse < float("inf")), inverse, 0.0)
    transform = hadamard(0, 0, SIZE, GROUP)
    squares = tl.zeros((TILE_M,), tl.int32)
    faults = tl.zeros((TILE_N // BLOCK,), tl.int32)
    for col0 in range(0, N, TILE_N):
        q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
        blocks = col0 // BLOCK + tl.arange(0, TILE_N // BLOCK)
        at = scale_ptr + ((row0 // BLOCK).to(tl.int64) * scale_stride + blocks)
        scale = tl.load(at, mask=blocks < tl.cdiv(N, BLOCK), other=0.0)
        faults |= ((scale != scale) | (scale == float("inf"))).to(tl.int32)
        ratios = tl.broadcast_to((scale * inverse)[:, None], (TILE_N // BLOCK, BLOCK))
        t = tl.dot(tl.reshape(q, (TILE_M * TILE_N // SIZE, SIZE)), transform)
        v = tl.reshape(t, (TILE_M, TILE_N)).to(tl.float32) * tl.reshape(ratios, (1, TILE_N))
        codes = tl.minimum(tl.maximum(tl.where(v == v, v, -8.0), -8.0), 7.0) + INTEGER
        codes = codes.to(tl.int32, bitcast=True) << 28 >> 28
        inside = (rows < M)[:, None] & (col0 + tl.arange(0, TILE_N) < N)[None, :]
        squares += tl.sum(tl.where(inside, codes * codes, 0), 1)
        if packed_ptr is not None:
            low, high = tl.split(tl.reshape(codes, (TILE_M, TILE_N // 2, 2)))
            pairs = ((low & 15) | (high << 4)).to(tl.int8)
            store_tile(packed_ptr, pairs, row0, col0 // 2, M, N // 2, N // 2)
        if wide_ptr is not None:
            store_tile(wide_ptr, (codes << 4).to(tl.int8), row0, col0, M, N, N)
    tl.store(squares_ptr + rows, squares, mask=rows < M)
    tl.atomic_max(counter_ptr, tl.max(faults, 0))
    if tl.atomic_add(counter_ptr + 1, 1) == tl.num_programs(0) - 1:
        fault = tl.atomic_xchg(counter_ptr, 0)
        tl.store(counter_ptr + 1, 0)
        usable = (fault == 0) & (inverse > 0)
        tl.store(unit_ptr, tl.where(usable, step, float("nan")))


class TritonHadamardQuantizeCodes(TritonKernel):
    """A program of `warps` warps takes `tile_m` whole rows, `tile_n` columns at a time."""

    op = "hadamard_quantize_codes"
    Config = TileConfig
    choices: ClassVar = {
        "tile_m": (4, 8, 16, 32),
        "tile_n": (128, 256, 512, 1024),
        "warps": (1, 2, 4, 8, 16),
    }

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        rows, columns = "a power of two of at most 32", "a power of two of at least 128"
        reason = (
            device_reason(device)
            or power_reason(config, "tile_m", expected=rows, most=32)
            or power_reason(config, "tile_n", expected=columns, least=128)
            or warps_reason(config)
            or share_reason(config.tile_m * config.tile_n, config, 8, 64)
        )
        size = size_of(problem)
        transforms = config.tile_m * config.tile_n // size
        if reason is None and transforms < 16:
            return f"{transforms} transforms in a tile: expected at least 16, of a matrix product"
        # With more, two warps share each transform, and the warps of one row of the tile have no
        # neighbouring numbers. Triton 3.6 then adds up a row's squares wrongly, on an H100.
        most = transforms // 16  # warps, of a product's 16 rows each
        if reason is None and config.tile_n > 16 * size and config.warps > most:
            return f"warps={config.warps}: expected at most {most} for {transforms} transforms"
        return reason or grid_reason(ceil_div(problem.m, config.tile_m))

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return a tile of whose elements a thread has 32."""
        return TileConfig(16, 256, 4)

    def launches(self, problem: Any, config: TileConfig, device: Device) -> tuple[Launch, ...]:
        given = {"factor": factor(problem.group), "SIZE": size_of(problem)}
        grid = (ceil_div(problem.m, config.tile_m),)
        return (Launch(hadamard_quantize_codes_kernel, grid, problem, config, **given, **EXACT),)

    def tensors(
        self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors
    ) -> dict[str, Any]:
        return {**inputs, **outputs, "counter": counters(inputs["q"].device, 2)}


def size_of(problem: Any) -> int:
    """Return the columns that are transformed at once: a product takes at least 32."""
    return max(32, problem.group)


KERNELS = (TritonHadamardQuantizeCodes(),)
