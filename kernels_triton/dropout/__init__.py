"""Dropout of codes and scales: one tile a program, the mask drawn in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from jetfire.kernels_triton.common import STREAM_DROPOUT, random_u16
from jetfire.kernels_triton.tiles import (
    TILE_SPACE,
    TileConfig,
    load_tile,
    store_quantised,
    tile_origin,
    tile_reason,
)
from jetfire.ops.device import Device
from jetfire.ops.op import Kernel, Tensors, ceil_div
from jetfire.reference.dropout import drop_threshold


# One compilation serves every probability.
@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    q_ptr, scale_ptr, q_out_ptr, scale_out_ptr, qt_ptr, scale_t_ptr, seed_ptr, threshold, M, N,
    stride, scale_stride,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    row0, col0 = tile_origin(N, TILE_M, TILE_N)
    q = load_tile(q_ptr, row0, col0, M, N, stride, TILE_M, TILE_N)
    scale = load_tile(
        scale_ptr, row0 // BLOCK, col0 // BLOCK, tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK),
        scale_stride, TILE_M // BLOCK, TILE_N // BLOCK,
    )  # fmt: skip
    bits = random_u16(tl.load(seed_ptr), row0, col0, TILE_M, TILE_N, STREAM_DROPOUT)
    kept = (65536 - threshold).to(tl.float32) * 1.52587890625e-05
    store_quantised(
        tl.where(bits >= threshold, q, 0), tl.div_rn(scale, kept),
        q_out_ptr, scale_out_ptr, qt_ptr, scale_t_ptr, row0, col0, M, N, BLOCK, LAYOUT,
    )  # fmt: skip


class TritonDropout(Kernel):
    op = "dropout"
    name = "triton"
    Config = TileConfig

    def legal(self, problem: Any, config: TileConfig, device: Device) -> str | None:
        return tile_reason(problem.m, problem.n, problem.block, config, device)

    def default(self, problem: Any, device: Device) -> TileConfig:
        return TileConfig(max(problem.block, 64), 128, 8)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return TILE_SPACE

    def launch(self, problem: Any, config: TileConfig, inputs: Tensors, outputs: Tensors) -> None:
        q, scale = inputs["q"], inputs["scale"]
        tiles = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        dropout_kernel[(tiles,)](
            q, scale, outputs.get("q"), outputs.get("scale"), outputs.get("qt"),
            outputs.get("scale_t"), inputs["seed"], drop_threshold(problem.p),
            problem.m, problem.n, q.stride(0), scale.stride(0),
            TILE_M=config.tile_m, TILE_N=config.tile_n, BLOCK=problem.block,
            LAYOUT=problem.layout, num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip


KERNELS = (TritonDropout(),)
