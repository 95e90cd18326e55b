"""A tile dealt to threads in groups of blocks: [ROWS, WIDTH], a group one or a few blocks wide.

Row r is row l·H + h of group g, with l the fastest and h the slowest part of r. Triton deals lanes,
then warps, along a tensor's rows and leaves the rest to registers, so with H values of h a group
lies in as few warps as its threads fill. A thread's rows are neighbours: of the transpose it has
words, not bytes, in one column. Groups are numbered along the tile's rows, blocks by
group. Two dimensions, because Triton 3.6 and 3.7 deal more of them in different orders.

What is dealt are blocks that are written, for their largest values are wanted. Blocks that are read
may be smaller or larger: each that the tile meets has a table of its codes' values, and an element
finds its table by its place in the tile.
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
# Beyond |x| = s·1 = 1000 both forms of GELU, and SiLU, are 0 or x; a larger s would overflow s³.
LARGEST_SCALE = tl.constexpr(1e3)
# Of values of blocks that are not written as they are read. In it a table holds at most 2^114, so
# that an entry times two codes is finite: whether a value overflows its scale says.
UNIT = tl.constexpr(2.0**14)


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
    row = row0 + group // ACROSS * BLOCK + dealt // (L * GROUPS) + dealt % L * H
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
    return tl.reshape(tl.permute(split, (1, 3, 0, 2, 4)), (DOWN * BLOCK, TILE_N))


@triton.jit
def table_of(
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Number the block that every element was read in, as `tile_blocks` does: [ROWS, WIDTH]."""
    COUNT: tl.constexpr = TILE_M * TILE_N // (OUT_BLOCK * OUT_BLOCK)
    if BLOCK == OUT_BLOCK:
        return spread_blocks(tl.arange(0, COUNT), H, BLOCK, WIDTH)
    ACROSS: tl.constexpr = (TILE_N + BLOCK - 1) // BLOCK
    dealt = tl.arange(0, TILE_M * TILE_N // WIDTH)
    row, col = places(0, 0, dealt, TILE_N, COUNT, H, OUT_BLOCK, WIDTH)
    cols = col[:, None] + tl.arange(0, WIDTH)[None, :]
    return (row // BLOCK * ACROSS)[:, None] + cols // BLOCK


@triton.jit
def tile_blocks(
    row0,
    col0,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    """Return row and column, in blocks, of those in a tile or of the one it is in, EACH times."""
    DOWN: tl.constexpr = (TILE_M + BLOCK - 1) // BLOCK
    ACROSS: tl.constexpr = (TILE_N + BLOCK - 1) // BLOCK
    block = tl.arange(0, DOWN * ACROSS * EACH) // EACH
    return row0 // BLOCK + block // ACROSS, col0 // BLOCK + block % ACROSS


@triton.jit
def load_at(ptr, rows, cols, M, N, stride):
    """Load elements of an M×N matrix, 0 beyond it; 64-bit offsets."""
    inside = (rows < M) & (cols < N)
    return tl.load(ptr + (rows.to(tl.int64) * stride + cols), mask=inside, other=0)


@triton.jit
def every_code(COUNT: tl.constexpr, EACH: tl.constexpr):
    """Return the codes from -128 on of COUNT/EACH blocks, fp32, by which their tables are made.

    EACH 1 gives a row of 256 per block: [COUNT, 256]. Another gives columns: at row h and column
    EACH·b + l is code EACH·h + l of block b. There a thread has few blocks, so few products of
    their scales; of a tile of 128×128 in rows it had all 16. GELU of blocks of 32 to 128 takes 13.0
    instructions per element so, not 15.3.
    """
    if EACH == 1:
        row = (tl.arange(0, 256) - 128).to(tl.float32)[None, :]
        code = tl.broadcast_to(row, (COUNT, 256))
    else:
        low = tl.arange(0, COUNT) % EACH - 128
        code = ((tl.arange(0, 256 // EACH) * EACH)[:, None] + low[None, :]).to(tl.float32)
    return code


@triton.jit
def by_code(v, EACH: tl.constexpr):
    """Return what blocks have, [COUNT], in the shape that goes with `every_code`."""
    return v[:, None] if EACH == 1 else v[None, :]


@triton.jit
def limited(scale):
    """Return scales that are finite and at most `LARGEST_SCALE`."""
    return tl.minimum(finite_or_zero(scale), LARGEST_SCALE)


@triton.jit
def look_up(values, q, table, EACH: tl.constexpr):
    """Return for every element its table's value at its code, of `every_code`: int8 [ROWS, WIDTH].

    It gathers in one dimension, which Triton 3.6 lowers to one LDS; two it lowers to shuffles or,
    for one block, not at all.
    """
    if EACH > 1:
        columns = tl.reshape(values, (256 // EACH, values.shape[1] // EACH, EACH))
        values = tl.permute(columns, (1, 0, 2))
    index = tl.reshape(codes_to_index(q, table), (q.shape[0] * q.shape[1],))
    return tl.reshape(tl.gather(tl.ravel(values), index, 0), q.shape)


@triton.jit
def faults(
    ptr,
    row0,
    col0,
    M,
    N,
    stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
):
    """Return for each block that is written NaN where a block read there has scale NaN, else 0."""
    PER: tl.constexpr = (OUT_BLOCK + BLOCK - 1) // BLOCK
    row, col = tile_blocks(row0, col0, TILE_M, TILE_N, OUT_BLOCK, 1)
    part = tl.arange(0, PER * PER)[None, :]
    rows = row[:, None] * OUT_BLOCK // BLOCK + part // PER
    cols = col[:, None] * OUT_BLOCK // BLOCK + part % PER
    scale = load_at(ptr, rows, cols, tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK), stride)
    return tl.sum(scale * 0.0, 1)


@triton.jit
def finite_or_zero(scale):
    """Replace the scales of blocks that hold NaN by 0, so that their elements stay finite."""
    return tl.where(tl.abs(scale) < float("inf"), scale, 0.0)


@triton.jit
def in_units(values, first, second):
    """Return tables, in columns, times their blocks' two factors, in `UNIT`s, at most 2^114.

    The smaller factor first: what overflows then is too large, and 0 stays 0.
    """
    first, second = finite_or_zero(first), finite_or_zero(second)
    small, large = tl.minimum(first, second), tl.maximum(first, second) * (1.0 / UNIT)
    product = values * small[None, :] * large[None, :]
    return tl.minimum(tl.maximum(product, -(2.0**114)), 2.0**114)


def deal(block: int, config: TileConfig) -> dict[str, int]:
    """Return how a tile is dealt: H vectors of 16 codes per thread and group, WIDTH codes per row.

    Blocks of 32 go in pairs: rows of 32 codes alone bound them by the passes of load and store.
    """
    width = max(block, min(config.tile_n, 64))
    vectors = config.tile_m * config.tile_n // (32 * config.warps * 16)
    return {"H": max(1, min(vectors, width * block // (32 * 16), block)), "WIDTH": width}
