"""Dropout of codes and scales: one tile per program, the mask drawn in registers.

Codes to be written in other blocks than they are read in are quantised anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.kernels_triton.codes import codes_to_floats
from jetfire.kernels_triton.common import (
    INTERPRETED,
    STREAM_DROPOUT,
    quantize_tile,
    random_u16,
    random_words,
    spread,
)
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    REGISTER_SPACE,
    RegisterConfig,
    TileKernel,
    grid_origin,
    load_tile,
    register_limit,
    store_quantised,
    tile_grid,
)
from jetfire.reference.dropout import drop_threshold


@triton.jit
def drop(q, seed, row0, col0, threshold):
    """Return the codes of a tile [R, C], 0 where the draw is below the threshold.

    A dot product with (1, 0) or (0, 1) takes either half of a word and subtracts the threshold in
    one instruction; PRMT makes bytes of the signs, which mask four codes at once.
    """
    R: tl.constexpr = q.shape[0]
    C: tl.constexpr = q.shape[1]
    if INTERPRETED:
        bits = random_u16(seed, row0, col0, R, C, STREAM_DROPOUT)
        return tl.where(bits >= threshold, q, 0)
    words = random_words(seed, row0, col0, R, C, STREAM_DROPOUT)
    low = tl.inline_asm_elementwise(
        "dp2a.lo.u32.u32 $0, $1, 1, $2;", "=r,r,r", [words, -threshold], tl.int32, True, 1
    )
    high = tl.inline_asm_elementwise(
        "dp2a.lo.u32.u32 $0, $1, 256, $2;", "=r,r,r", [words, -threshold], tl.int32, True, 1
    )
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $2, $3, 0x00fb;
        prmt.b32 b, $4, $5, 0x00fb;
        prmt.b32 a, a, b, 0x5410;
        not.b32 a, a;
        and.b32 $0, $1, a;
        }""",
        "=r,r,r,r,r,r",
        [q, tl.reshape(tl.join(low, high), (R, C))],
        tl.int8,
        True,
        4,
    )


# One compilation serves every probability.
@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    q_ptr,
    scale_ptr,
    q_out_ptr,
    scale_out_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    threshold,
    M,
    N,
    stride,
    scale_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
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
    q = drop(q, tl.load(seed_ptr), row0, col0, threshold)
    kept = (65536 - threshold).to(tl.float32) * 1.52587890625e-05
    scale = tl.div_rn(scale, kept)
    if BLOCK != OUT_BLOCK:
        x = codes_to_floats(q) * spread(scale, BLOCK)
        q, scale = quantize_tile(x, 0, row0, col0, OUT_BLOCK, False)
    store_quantised(
        q,
        scale,
        q_out_ptr,
        scale_out_ptr,
        qt_ptr,
        scale_t_ptr,
        row0,
        col0,
        M,
        N,
        OUT_BLOCK,
        LAYOUT,
    )


class TritonDropout(TileKernel):
    op = "dropout"
    Config = RegisterConfig
    choices = REGISTER_SPACE

    def default(self, problem: Any, device: Device) -> RegisterConfig:
        """Return the best tile measured on an H200 at 8192×4096 and 8192×16384.

        None was of unequal blocks: theirs spills nothing, and leaves an SM room for two.
        """
        if problem.block != problem.out_block:
            return RegisterConfig(max(problem.block, problem.out_block), 128, 8)
        if problem.block == 128:
            # More programs share an SM with 64 registers: 18.7 µs, not 20.5.
            return RegisterConfig(128, 128, 8, 64 if problem.layout == "q" else 255)
        if problem.block == 32 and problem.layout == "q":
            return RegisterConfig(32, 256, 8)
        return RegisterConfig(64, 256, 8)

    def launches(self, problem: Any, config: RegisterConfig, device: Device) -> tuple[Launch, ...]:
        grid = tile_grid(problem.m, problem.n, config)
        given = {"threshold": drop_threshold(problem.p), **EXACT, **register_limit(config)}
        return (Launch(dropout_kernel, grid, problem, config, **given),)

    def tensors(
        self, problem: Any, config: RegisterConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        written = {"q_out": outputs.get("q"), "scale_out": outputs.get("scale")}
        return {**outputs, **inputs, **written}


KERNELS = (TritonDropout(),)
