"""Rotary position embeddings: some rows of some heads per program, angles loaded once for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_triton.common import to_float
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import (
    device_reason,
    load_tile,
    power_reason,
    share_reason,
    store_tile,
    warps_reason,
)


@dataclass(frozen=True)
class RopeConfig(Config):
    """`rows` rows of `heads` heads, one after another, for each program of `warps` warps."""

    rows: int = 16
    heads: int = 4
    warps: int = 4


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    M,
    N,
    x_stride,
    cos_stride,
    sin_stride,
    y_stride,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Turn a program's heads; WIDTH: HALF, rounded up to a power of two.

    Columns beyond HALF are masked by the width that loads and stores are told.
    """
    row0, head0 = tl.program_id(1) * ROWS, tl.program_id(0) * HEADS
    row0 += tl.program_id(2) * tl.num_programs(1) * ROWS
    cos = load_tile(cos_ptr, row0, 0, M, HALF, cos_stride, ROWS, WIDTH)
    sin = load_tile(sin_ptr, row0, 0, M, HALF, sin_stride, ROWS, WIDTH)
    if INVERSE:
        sin = -sin
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    for i in tl.static_range(HEADS):
        left = (head0 + i) * 2 * HALF
        right = left + HALF
        # A half ends where the next one begins, and beyond the last head there is none.
        end, last = tl.minimum(right, N), tl.minimum(right + HALF, N)
        first = load_tile(x_ptr, row0, left, M, end, x_stride, ROWS, WIDTH).to(tl.float32)
        second = load_tile(x_ptr, row0, right, M, last, x_stride, ROWS, WIDTH).to(tl.float32)
        turned = first * cos - second * sin, second * cos + first * sin
        store_tile(y_ptr, to_float(turned[0], dtype), row0, left, M, end, y_stride)
        store_tile(y_ptr, to_float(turned[1], dtype), row0, right, M, last, y_stride)


class TritonRope(TritonKernel):
    op = "rope"
    name = "triton"
    Config = RopeConfig
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "rows": (1, 2, 4, 8, 16, 32, 64),
        "heads": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8),
    }

    def legal(self, problem: Any, config: RopeConfig, device: Device) -> str | None:
        pairs = config.rows * triton.next_power_of_2(problem.head // 2)
        return (
            device_reason(device)
            or power_reason(config, "rows")
            or power_reason(config, "heads", expected="a power of two, at most 32", most=32)
            or warps_reason(config, most=32)
            or share_reason(pairs, config, 0, 64, "pairs")
        )

    def default(self, problem: Any, device: Device) -> RopeConfig:
        """Return rows for 8 pairs per thread of four warps: on an H100 within 4% of the best."""
        width = triton.next_power_of_2(problem.head // 2)
        heads = min(4, triton.next_power_of_2(problem.n))
        return RopeConfig(max(1, 1024 // width), heads, 4)

    def launches(self, problem: Any, config: RopeConfig, device: Device) -> tuple[Launch, ...]:
        half = problem.head // 2
        down = ceil_div(problem.m, config.rows)
        deep = ceil_div(down, 65535)
        grid = ceil_div(problem.n, config.heads), ceil_div(down, deep), deep
        given = {"N": problem.width, "HALF": half, "WIDTH": triton.next_power_of_2(half)}
        return (Launch(rope_kernel, grid, problem, config, **given, **EXACT),)


KERNELS = (TritonRope(),)
