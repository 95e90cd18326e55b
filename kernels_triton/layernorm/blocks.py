"""A row of blocks as [H, COUNT, L, V, VEC]: row h·L + l, column v·VEC + e of each of COUNT blocks.

Triton deals lanes, then warps, to a tensor's last dimensions and leaves the first to registers: a
thread holds VEC neighbours of H rows. What belongs to rows or blocks is loaded in its own small
shape: Triton lets a load of fewer numbers than there are threads take whatever layout its use has,
where a larger one would impose its own and move every element through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.common import (
    INTERPRETED,
    STREAM_ROUNDING,
    block_scales,
    max_nan,
    philox_words,
)
from jetfire.kernels_triton.gelu.packed import draws_128
from jetfire.kernels_triton.tiles import store_tile

_NEAREST = tl.constexpr("""{
.reg .f32 f<4>; .reg .b32 r<6>;
fma.rn.f32 f0, $1, $5, 0f4B400000; fma.rn.f32 f1, $2, $6, 0f4B400000;
fma.rn.f32 f2, $3, $7, 0f4B400000; fma.rn.f32 f3, $4, $8, 0f4B400000;
mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $9; }""")
# 128 + u + p lies in [1, 256), so rounding it down onto 1.5·2^23 − 128 leaves floor(p + u) there.
_STOCHASTIC = tl.constexpr("""{
.reg .f32 f<4>; .reg .b32 r<6>;
fma.rn.f32 f0, $1, $5, $10; fma.rn.f32 f1, $2, $6, $11;
fma.rn.f32 f2, $3, $7, $12; fma.rn.f32 f3, $4, $8, $13;
add.rm.f32 f0, f0, 0f4B3FFF80; add.rm.f32 f1, f1, 0f4B3FFF80;
add.rm.f32 f2, f2, 0f4B3FFF80; add.rm.f32 f3, f3, 0f4B3FFF80;
mov.b32 r0, f0; mov.b32 r1, f1; mov.b32 r2, f2; mov.b32 r3, f3;
prmt.b32 r4, r0, r1, 0x0040; prmt.b32 r5, r2, r3, 0x0040;
prmt.b32 r4, r4, r5, 0x5410; and.b32 $0, r4, $9; }""")


@triton.jit
def block_rows(H: tl.constexpr, L: tl.constexpr):
    """The rows of a block: [H, 1, L, 1, 1]."""
    rows = tl.arange(0, H)[:, None] * L + tl.arange(0, L)[None, :]
    return rows[:, None, :, None, None]


@triton.jit
def block_cols(COUNT: tl.constexpr, V: tl.constexpr, VEC: tl.constexpr):
    """The columns of a row of blocks: [1, COUNT, 1, V, VEC]."""
    vector = tl.arange(0, COUNT)[:, None] * V + tl.arange(0, V)[None, :]
    cols = vector[:, :, None] * VEC + tl.arange(0, VEC)[None, None, :]
    return cols[None, :, None, :, :]


@triton.jit
def load_columns(ptr, col0, N, COUNT: tl.constexpr, V: tl.constexpr, VEC: tl.constexpr):
    """The fp32 numbers of columns: [1, COUNT, 1, V, VEC].

    Loaded as a vector: a load of fp32 in the codes' shape would deal every lane four columns, and
    the codes be dealt alike.
    """
    cols = col0 + tl.arange(0, COUNT * V * VEC)
    x = tl.load(ptr + cols, mask=cols < N, other=0.0)
    return tl.reshape(x, (1, COUNT, 1, V, VEC))


@triton.jit
def load_scales(scale_ptr, row0, col0, M, N, stride, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of a row of blocks, 0 outside the matrix: [1, COUNT, 1, 1, 1]."""
    block = (col0 // BLOCK + tl.arange(0, COUNT))[None, :, None, None, None]
    at = scale_ptr + ((row0 // BLOCK).to(tl.int64) * stride + block)
    return tl.load(at, mask=(block * BLOCK < N) & (row0 < M), other=0.0)


@triton.jit
def block_amax(x):
    """max|x| of every block: [H, COUNT, L, V, VEC] to [COUNT]; NaN or ∞ where it holds NaN."""
    x = tl.abs(x)
    if INTERPRETED:
        # The interpreter's own max drops NaN, and any other reduction is a Python loop there.
        x = tl.where(x == x, x, float("inf"))
        return tl.max(tl.max(tl.max(tl.max(x, 4), 0), 2), 1)
    x = tl.reduce(tl.reduce(x, 4, max_nan), 0, max_nan)
    return tl.reduce(tl.reduce(x, 2, max_nan), 1, max_nan)


@triton.jit
def draws(seed, row0, col0, H: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """128 + u for each element of a row of blocks: [H, COUNT, L, V, 8]."""
    shape: tl.constexpr = (H, COUNT, L, V)
    rows = tl.arange(0, H)[:, None] * L + tl.arange(0, L)[None, :]
    groups = tl.arange(0, COUNT)[:, None] * V + tl.arange(0, V)[None, :]
    c0 = tl.broadcast_to((col0 // 8 + groups)[None, :, None, :], shape)
    c1 = tl.broadcast_to((row0 + rows)[:, None, :, None], shape)
    w0, w1, w2, w3 = philox_words(seed, c0.to(tl.uint32), c1.to(tl.uint32), STREAM_ROUNDING)
    return tl.reshape(draws_128(w0, w1, w2, w3), (H, COUNT, L, V, 8))


@triton.jit
def round_codes(x, multiplier, u, STOCHASTIC: tl.constexpr):
    """Codes of [H, COUNT, L, V, VEC] values, the product rounded with the addition; [COUNT].

    u is 128 + the draws; |x·multiplier| < 127 then. 0 in a block of multiplier 0, which may hold
    NaN.
    """
    multiplier = multiplier[None, :, None, None, None]
    wide = tl.broadcast_to(multiplier, x.shape)
    if INTERPRETED:
        x = tl.where(wide != 0, x, 0.0)
        if STOCHASTIC:
            return tl.floor(tl.fma(x, wide, u) - 128.0).to(tl.int8)
        return (tl.fma(x, wide, tl.full(x.shape, 12582912.0, tl.float32)) - 12582912.0).to(tl.int8)
    mask = tl.broadcast_to(tl.where(multiplier != 0, -1, 0).to(tl.int8), x.shape)
    if STOCHASTIC:
        return tl.inline_asm_elementwise(
            _STOCHASTIC, "=r,f,f,f,f,f,f,f,f,r,f,f,f,f", [x, wide, mask, u], dtype=tl.int8,
            is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        _NEAREST, "=r,f,f,f,f,f,f,f,f,r", [x, wide, mask], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def store_blocks(
    x, seed, q_ptr, scale_ptr, qt_ptr, scale_t_ptr, row0, col0, rows, cols, inside, M, N,
    BLOCK: tl.constexpr, LAYOUT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Quantise a row of blocks and write codes and scales as LAYOUT says.

    Args:
        x: [H, COUNT, L, V, VEC], zeros where not inside; VEC is 8 if STOCHASTIC.
        rows: [H, 1, L, 1, 1]; cols: [1, COUNT, 1, V, VEC].
    """
    COUNT: tl.constexpr = x.shape[1]
    scale, multiplier = block_scales(block_amax(x))
    u = x
    if STOCHASTIC:
        u = draws(seed, row0, col0, x.shape[0], COUNT, x.shape[2], x.shape[3])
        multiplier *= 0.9999998  # a product of just -127 might floor to -128
    q = round_codes(x, multiplier, u, STOCHASTIC)
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    block = col0 // BLOCK + tl.arange(0, COUNT)
    if LAYOUT != "qt":
        tl.store(q_ptr + (rows.to(tl.int64) * N + cols), q, mask=inside)
        at = scale_ptr + (row0 // BLOCK).to(tl.int64) * blocks_n + block
        tl.store(at, scale, mask=(block < blocks_n) & (row0 < M))
    if LAYOUT != "q":
        tile = tl.reshape(tl.permute(q, (0, 2, 1, 3, 4)), (BLOCK, COUNT * BLOCK))
        store_tile(qt_ptr, tl.trans(tile), col0, row0, N, M, M)
        at = scale_t_ptr + block.to(tl.int64) * blocks_m + row0 // BLOCK
        tl.store(at, scale, mask=(block < blocks_n) & (row0 < M))
