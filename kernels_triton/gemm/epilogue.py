"""The end of a tile in Gluon: bias, then what C held and the cast, or the requantisation."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.common import STREAM_ROUNDING, TINY
from jetfire.kernels_triton.gluon_common import max_nan, philox_words

GROUPS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [2, 2], [1, 0]))  # of eight neighbours
ROWS_OF_16 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def store_tile(ptr, tile, row0, col0, M, N):
    """Write the part of a tile that lies within a contiguous M×N matrix; 64-bit offsets."""
    layout: gl.constexpr = tile.type.layout
    rows = row0 + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    inside = (rows < M).expand_dims(1) & (cols < N).expand_dims(0)
    gl.store(ptr + (rows.to(gl.int64) * N).expand_dims(1) + cols.expand_dims(0), tile, mask=inside)


@gluon.jit
def places(row0, col0, M, N, R: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Return the rows and columns of C of a part's elements, and which of them exist."""
    rows = row0 + gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return rows, cols, (rows < M).expand_dims(1) & (cols < N).expand_dims(0)


@gluon.jit
def with_bias(acc, bias_ptr, cols, N):
    return acc + gl.load(bias_ptr + cols, mask=cols < N, other=0.0).expand_dims(0)


@gluon.jit
def store_float(
    acc, bias_ptr, c_ptr, row0, col0, M, N, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr
):
    """Add the bias and what C held, cast and write a part."""
    layout: gl.constexpr = acc.type.layout
    rows, cols, inside = places(row0, col0, M, N, acc.shape[0], acc.shape[1], layout)
    ptrs = c_ptr + (rows.to(gl.int64) * N).expand_dims(1) + cols.expand_dims(0)
    if BIAS:
        acc = with_bias(acc, bias_ptr, cols, N)
    if ACCUMULATE:
        acc += gl.load(ptrs, mask=inside, other=0.0).to(gl.float32)
    gl.store(ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def biased(acc, bias_ptr, row0, col0, M, N, BIAS: gl.constexpr):
    """Add the bias to a part; what lies beyond C stays 0, as it is without a bias."""
    if BIAS:
        layout: gl.constexpr = acc.type.layout
        _, cols, inside = places(row0, col0, M, N, acc.shape[0], acc.shape[1], layout)
        acc = gl.where(inside, with_bias(acc, bias_ptr, cols, N), 0.0)
    return acc


@gluon.jit
def blocked_amax(acc, BLOCK: gl.constexpr):
    """Return max|x| of each block (or of the part's share of it), NaN if it holds NaN."""
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = max(R // BLOCK, 1)
    COLS: gl.constexpr = max(C // BLOCK, 1)
    blocks = gl.abs(acc).reshape((ROWS, R // ROWS, COLS, C // COLS))
    return gl.reduce(gl.reduce(blocks, 3, max_nan), 1, max_nan)


@gluon.jit
def block_scales(amax):
    """Return scale and multiplier of a block, as jetfire.kernels_triton.common.block_scales."""
    usable = (amax >= TINY) & (amax < float("inf"))
    safe = gl.where(usable, amax, 127.0)
    zero = amax < TINY
    scale = gl.where(usable, gl.div_rn(safe, 127.0), gl.where(zero, 0.0, float("nan")))
    most = gl.full_like(safe, 127.0)
    return scale, gl.where(usable, gl.div_rn(most, safe), 0.0)


@gluon.jit
def random_u16(seed, row0, col0, R: gl.constexpr, C: gl.constexpr):
    """Return jetfire.reference.philox.random_u16's sixteen bits per element: uint16 [R, C]."""
    rows = (row0 + gl.arange(0, R, layout=gl.SliceLayout(1, GROUPS))).to(gl.uint32)
    groups = (col0 // 8 + gl.arange(0, C // 8, layout=gl.SliceLayout(0, GROUPS))).to(gl.uint32)
    c2 = gl.full([R, C // 8], 0, gl.uint32, GROUPS)
    c3 = c2 + STREAM_ROUNDING
    c0 = c2 + groups.expand_dims(0)
    c1 = c2 + rows.expand_dims(1)
    words = philox_words(seed, c0, c1, c2, c3)
    return gl.join(words & 0xFFFF, words >> 16).reshape((R, C)).to(gl.uint16)


@gluon.jit
def codes(acc, multiplier, seed, row0, col0, STOCHASTIC: gl.constexpr):
    """Return the tile's codes, int8, from a multiplier for each block; NaN gives 0."""
    R: gl.constexpr = acc.shape[0]
    C: gl.constexpr = acc.shape[1]
    ROWS: gl.constexpr = multiplier.shape[0]
    COLS: gl.constexpr = multiplier.shape[1]
    blocks = acc.reshape((ROWS, R // ROWS, COLS, C // COLS))
    p = (blocks * multiplier.expand_dims(1).expand_dims(3)).reshape((R, C))
    p = gl.convert_layout(p, acc.type.layout, assert_trivial=True)
    if STOCHASTIC:
        bits = gl.convert_layout(random_u16(seed, row0, col0, R, C), acc.type.layout)
        p += bits.to(gl.float32) * 1.52587890625e-05
        q = gl.inline_asm_elementwise(
            "cvt.rmi.s32.f32 $0, $1;", "=r,f", [p], dtype=gl.int32, is_pure=True, pack=1
        )
        q = gl.maximum(q, -127)  # a product that rounds to just below -127 may floor to -128
    else:
        q = gl.inline_asm_elementwise(
            "cvt.rni.s32.f32 $0, $1;", "=r,f", [p], dtype=gl.int32, is_pure=True, pack=1
        )
    return q.to(gl.int8)


@gluon.jit
def store_codes(
    acc,
    amax,
    seed,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    row0,
    col0,
    M,
    N,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
):
    """Requantise a part whose blocks have these maxima; write q, its transpose, or both."""
    scale, multiplier = block_scales(amax)
    q = codes(acc, multiplier, seed, row0, col0, STOCHASTIC)
    down, across = gl.cdiv(M, BLOCK), gl.cdiv(N, BLOCK)
    if LAYOUT != "qt":
        store_tile(q_ptr, gl.convert_layout(q, ROWS_OF_16), row0, col0, M, N)
        store_tile(scale_ptr, scale, row0 // BLOCK, col0 // BLOCK, down, across)
    if LAYOUT != "q":
        qt = gl.convert_layout(q.permute((1, 0)), ROWS_OF_16)
        store_tile(qt_ptr, qt, col0, row0, N, M)
        store_tile(scale_t_ptr, scale.permute((1, 0)), col0 // BLOCK, row0 // BLOCK, across, down)


@gluon.jit
def finish(
    parts,
    bias_ptr,
    c_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    row0,
    col0,
    M,
    N,
    BLOCK: gl.constexpr,
    BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    INT8: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
):
    """Write a consumer's 128×128: `parts` of 64 rows each, all of one half before the other's."""
    PARTS: gl.constexpr = len(parts)
    R: gl.constexpr = parts[0].shape[0]
    C: gl.constexpr = parts[0].shape[1]
    seed = gl.load(seed_ptr) if STOCHASTIC else 0
    both = 0.0
    if INT8 and BLOCK > R:
        top = biased(parts[0], bias_ptr, row0, col0, M, N, BIAS)
        low = biased(parts[1], bias_ptr, row0 + R, col0, M, N, BIAS)
        both = max_nan(blocked_amax(top, BLOCK), blocked_amax(low, BLOCK))
    for i in gl.static_range(PARTS):
        row, col = row0 + i // (PARTS // 2) * R, col0 + i % (PARTS // 2) * C
        if INT8:
            acc = biased(parts[i], bias_ptr, row, col, M, N, BIAS)
            amax = both if BLOCK > R else blocked_amax(acc, BLOCK)
            store_codes(
                acc,
                amax,
                seed,
                q_ptr,
                scale_ptr,
                qt_ptr,
                scale_t_ptr,
                row,
                col,
                M,
                N,
                BLOCK,
                LAYOUT,
                STOCHASTIC,
            )
        else:
            store_float(parts[i], bias_ptr, c_ptr, row, col, M, N, BIAS, ACCUMULATE)
