"""Floats from codes and scales: one tile per program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.kernels_triton.common import spread, to_float
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.kernels_triton.tiles import (
    TILE_SPACE,
    TileConfig,
    grid_origin,
    load_tile,
    store_tile,
    tile_grid,
    tile_reason,
)


@triton.jit
def dequantize_kernel(
    q_ptr,
    scale_ptr,
    x_ptr,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
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
    x = to_float(q.to(tl.float32) * spread(scale, BLOCK), x_ptr.dtype.element_ty)
    store_tile(x_ptr, x, row0, col0, M, N, N)


class TritonDequantize(TritonKernel):
    op = "dequantize"
    name = "triton"
    Config = TileConfig

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        return tile_reason(problem.m, problem.n, problem.block, config, device)

    def default(self, problem: Any, device: Device) -> TileConfig:
        """Return the best tile measured on an H200 at 8192×4096 and 8192×16384."""
        if problem.block == 128:
            return TileConfig(128, 128, 8)
        return TileConfig(problem.block, 256, problem.block // 8)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return TILE_SPACE

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        q, scale = inputs["q"], inputs["scale"]
        dequantize_kernel[tile_grid(problem.m, problem.n, config)](
            q,
            scale,
            outputs["x"],
            problem.m,
            problem.n,
            q.stride(0),
            scale.stride(0),
            TILE_M=config.tile_m,
            TILE_N=config.tile_n,
            BLOCK=problem.block,
            num_warps=config.warps,
            enable_fp_fusion=False,
        )


KERNELS = (TritonDequantize(),)
