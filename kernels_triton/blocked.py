"""A tile dealt to threads in groups of blocks: [ROWS, WIDTH], a group one or a few blocks wide.

Row r is row h·L + l of group g, with l the fastest and h the slowest part of r. Triton deals lanes,
then warps, along a tensor's rows and leaves the rest to registers, so with H values of h a group
lies in as few warps as its threads fill. Groups are numbered along the tile's rows, blocks by
group. Two dimensions, because Triton 3.6 and 3.7 deal more of them in different orders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jetfire.kernels_triton.codes import codes_to_index, draws_128
from jetfire.kernels_triton.common import philox_words
from jetfire.kernels_triton.tiles import TileConfig

# Codes a thread reads at once, and neighbours that share a Philox call.
VECTOR = tl.constexpr(16)
GROUP = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)
# Beyond |x| = s·1 = 1000 both forms of GELU, and SiLU, are 0 or x; a larger s would overflow s³.
LARGEST_SCALE = tl.constexpr(1e3)


@triton.jit
def places(
    row0,
    col0,
    dealt,
    TILE_N: tl.constexpr,
    COUNT: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find row and first column, in the tensor, of each dealt row r of the tile at (row0, col0)."""
    L: tl.constexpr = BLOCK // H
    ACROSS: tl.constexpr = TILE_N // WIDTH
    GROUPS: tl.constexpr = COUNT * BLOCK // WIDTH
    group = dealt // L % GROUPS
    row = row0 + group // ACROSS * BLOCK + dealt // (L * GROUPS) * L + dealt % L
    return row, col0 + group % ACROSS * WIDTH


@triton.jit
def block_max(x, H: tl.constexpr, BLOCK: tl.constexpr):
    """Return max|x| of every block, finite: [ROWS, WIDTH] to [COUNT]; registers first."""
    PER: tl.constexpr = x.shape[1] // BLOCK
    GROUPS: tl.constexpr = x.shape[0] // BLOCK
    blocks = tl.reshape(tl.abs(x), (H, GROUPS, BLOCK // H, PER, BLOCK))
    return tl.reshape(tl.max(tl.max(tl.max(blocks, 0), 3), 1), (GROUPS * PER,))


@triton.jit
def spread_blocks(v, H: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Repeat each block's value at each of its elements: [COUNT] to [ROWS, WIDTH]."""
    PER: tl.constexpr = WIDTH // BLOCK
    GROUPS: tl.constexpr = v.shape[0] // PER
    grouped = tl.reshape(v, (GROUPS, PER))[None, :, None, :, None]
    wide = tl.broadcast_to(grouped, (H, GROUPS, BLOCK // H, PER, BLOCK))
    return tl.reshape(wide, (GROUPS * BLOCK, WIDTH))


@triton.jit
def random_128(
    seed,
    row0,
    col0,
    TILE_N: tl.constexpr,
    COUNT: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    stream: tl.constexpr,
):
    """Return 128 + u for every element, [ROWS, WIDTH], u as jetfire.reference.philox draws it.

    A thread's VECTOR neighbours take two calls: the slowest part of a row, so both are its own.
    """
    ROWS: tl.constexpr = COUNT * BLOCK * BLOCK // WIDTH
    PAIR: tl.constexpr = VECTOR // GROUP
    ACROSS: tl.constexpr = WIDTH // VECTOR
    dealt = tl.arange(0, PAIR * ROWS)
    row, col = places(row0, col0, dealt % ROWS, TILE_N, COUNT, H, BLOCK, WIDTH)
    group = (col // GROUP + dealt // ROWS)[:, None] + (tl.arange(0, ACROSS) * PAIR)[None, :]
    c1 = tl.broadcast_to(row[:, None], group.shape)
    w0, w1, w2, w3 = philox_words(seed, group.to(tl.uint32), c1.to(tl.uint32), stream)
    draws = tl.reshape(draws_128(w0, w1, w2, w3), (PAIR, ROWS, ACROSS, GROUP))
    return tl.reshape(tl.permute(draws, (1, 2, 0, 3)), (ROWS, WIDTH))


@triton.jit
def as_tile(x, TILE_N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """Put dealt rows back in place: [ROWS, WIDTH] to [TILE_M, TILE_N]."""
    WIDTH: tl.constexpr = x.shape[1]
    ACROSS: tl.constexpr = TILE_N // WIDTH
    DOWN: tl.constexpr = x.shape[0] // (BLOCK * ACROSS)
    split = tl.reshape(x, (H, DOWN, ACROSS, BLOCK // H, WIDTH))
    return tl.reshape(tl.permute(split, (1, 0, 3, 2, 4)), (DOWN * BLOCK, TILE_N))


@triton.jit
def look_up(table, q, H: tl.constexpr, BLOCK: tl.constexpr):
    """Return table[block, q + 128] for every element: fp32 [COUNT, 256], int8 [ROWS, WIDTH].

    It gathers in one dimension, which Triton 3.6 lowers to one LDS; two it lowers to shuffles or,
    for one block, not at all.
    """
    COUNT: tl.constexpr = table.shape[0]
    ELEMENTS: tl.constexpr = q.shape[0] * q.shape[1]
    block = spread_blocks(tl.arange(0, COUNT), H, BLOCK, q.shape[1])
    index = tl.reshape(codes_to_index(q, block), (ELEMENTS,))
    return tl.reshape(tl.gather(tl.reshape(table, (COUNT * 256,)), index, 0), q.shape)


@triton.jit
def finite_or_zero(scale):
    """Replace the scales of blocks that hold NaN by 0, so that their elements stay finite."""
    return tl.where(tl.abs(scale) < float("inf"), scale, 0.0)


def deal(block: int, config: TileConfig) -> dict[str, int]:
    """Return how a tile is dealt: H vectors of 16 codes per thread and group, WIDTH codes per row.

    Blocks of 32 go in pairs: rows of 32 codes alone bound them by the passes of load and store.
    """
    width = max(block, min(config.tile_n, 64))
    vectors = config.tile_m * config.tile_n // (32 * config.warps * 16)
    return {"H": max(1, min(vectors, width * block // (32 * 16), block)), "WIDTH": width}
