"""The per-block INT8 GEMM for sm_90 in Gluon: TMA, a producer warp, two consumer warp groups.

The consumers are partitions of their own: while one promotes, the other multiplies. Each holds
128×128 of C in fp32, 128 registers per thread, and multiplies 64×chunk parts of it in turn into 64
int32 registers: one product of 128 columns, or two of 64 of which one is promoted while the other
is on its way. The 128×256 tile asks the L2 cache for 5.9 TB/s at 1000 TOPS, 128×128 for 7.8.

The producer also multiplies the scales of each stage, so that a consumer reads one product for
each block from shared memory: read from global memory by each consumer, they made it spill.
On an H200 at 8192³ (docs/results): 450, 718 and 1015 TOPS for blocks of 32, 64 and 128; cores
that never wait for memory reach 618, 1019 and 1521 with the same promotion.
"""

# ruff: noqa: RUF005  Gluon compiles no starred expression.
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jetfire.kernels_triton.gemm.epilogue import finish

HALF = gl.constexpr(64)  # rows of a wgmma
WIDE = gl.constexpr(128)  # rows and columns of a consumer, and the K of a stage


@gluon.jit
def tile_of(pid, M, N, TILE_N: gl.constexpr, GROUP: gl.constexpr):
    """Return a program's tile row and column: GROUP rows of tiles at a time, to stay in L2."""
    down, across = gl.cdiv(M, WIDE), gl.cdiv(N, TILE_N)
    first = pid // (GROUP * across) * GROUP
    rows = gl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    return first + within % rows, within // rows


@gluon.jit
def load_scales(ptr, at, last, i, blocks, COUNT: gl.constexpr, layout: gl.constexpr):
    """Load the scales of block i of K for COUNT rows of blocks from `at` on.

    Beyond the edge they are the last row's: the products there are zeros or are not kept.
    """
    rows = gl.minimum(at + gl.arange(0, COUNT, layout=layout), last)
    return gl.load(ptr + rows.to(gl.int64) * blocks + i)


@gluon.jit
def produce(
    a_desc,
    b_desc,
    a_smem,
    b_smem,
    s_smem,
    full,
    empty,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Keep STAGES stages on their way: A (128×128), B (CONSUMERS × 128×128), and sA·sB."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, 1], [1, 0])
    COUNT: gl.constexpr = WIDE // BLOCK
    blocks = gl.cdiv(K, BLOCK)
    down, across = gl.cdiv(M, BLOCK), gl.cdiv(N, BLOCK)
    tiles = gl.cdiv(M, WIDE) * gl.cdiv(N, WIDE * CONSUMERS)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_row, tile_col = tile_of(tile, M, N, WIDE * CONSUMERS, GROUP)
        for k in range(0, K, WIDE):
            products = ()
            for i in gl.static_range(COUNT):
                at = gl.minimum(k // BLOCK + i, blocks - 1)
                a_scale = load_scales(
                    a_scale_ptr,
                    tile_row * COUNT,
                    down - 1,
                    at,
                    blocks,
                    COUNT,
                    gl.SliceLayout(1, layout),
                )
                b_scale = load_scales(
                    b_scale_ptr,
                    tile_col * COUNT * CONSUMERS,
                    across - 1,
                    at,
                    blocks,
                    COUNT * CONSUMERS,
                    gl.SliceLayout(0, layout),
                )
                products = products + (a_scale.expand_dims(1) * b_scale.expand_dims(0),)
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, (1 + CONSUMERS) * WIDE * WIDE)
            tma.async_copy_global_to_shared(a_desc, [tile_row * WIDE, k], ready, a_smem.index(slot))
            for j in gl.static_range(CONSUMERS):
                row = (tile_col * CONSUMERS + j) * WIDE
                tma.async_copy_global_to_shared(
                    b_desc, [row, k], ready, b_smem.index(slot * CONSUMERS + j)
                )
            for i in gl.static_range(COUNT):
                s_smem.index(slot * COUNT + i).store(products[i])
            mbarrier.arrive(ready, count=1)
            step += 1


@gluon.constexpr_function
def parts_of(chunk):
    """Count the 64×chunk parts of a consumer's 128×128."""
    return 256 // chunk


@gluon.constexpr_function
def part_of(q, block, chunk):
    """Return the part of product q of a stage: two of 64 columns alternate along the stage's K."""
    return q // (256 // block) * 2 + q % 2 if chunk == 64 else q % 2


@gluon.constexpr_function
def block_of(q, block, chunk):
    """Return the block of the stage's K that product q multiplies."""
    return q % (256 // block) // 2 if chunk == 64 else q // 2


@gluon.jit
def issue(a, b, Q: gl.constexpr, BLOCK: gl.constexpr, CHUNK: gl.constexpr, layout: gl.constexpr):
    """Start the exact int32 product that is number Q of a stage."""
    part: gl.constexpr = part_of(Q, BLOCK, CHUNK)
    i: gl.constexpr = block_of(Q, BLOCK, CHUNK)
    row: gl.constexpr = part // (WIDE // CHUNK) * HALF
    col: gl.constexpr = part % (WIDE // CHUNK) * CHUNK
    a = a.slice(i * BLOCK, BLOCK, dim=1).slice(row, HALF, dim=0)
    b = b.slice(i * BLOCK, BLOCK, dim=1).slice(col, CHUNK, dim=0).permute((1, 0))
    zero = gl.zeros((HALF, CHUNK), gl.int32, layout)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def scale_of(
    s,
    J: gl.constexpr,
    PART: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK: gl.constexpr,
    layout: gl.constexpr,
):
    """Load a part's scales: fp32 [blocks of rows, 1, blocks of columns, 1]."""
    row: gl.constexpr = PART // (WIDE // CHUNK) * HALF
    col: gl.constexpr = PART % (WIDE // CHUNK) * CHUNK + J * WIDE
    rows = s.slice(row // BLOCK, max(HALF // BLOCK, 1), dim=0)
    scale = rows.slice(col // BLOCK, max(CHUNK // BLOCK, 1), dim=1).load(layout)
    return scale.expand_dims(1).expand_dims(3)


@gluon.jit
def promote(
    c,
    sums,
    s_smem,
    at,
    J: gl.constexpr,
    Q: gl.constexpr,
    BLOCK: gl.constexpr,
    layout: gl.constexpr,
    scales: gl.constexpr,
):
    """Add product Q of the stage to a part of the tile: one I2F and one FMA per element."""
    CHUNK: gl.constexpr = c.shape[1]
    part: gl.constexpr = part_of(Q, BLOCK, CHUNK)
    scale = scale_of(s_smem.index(at + block_of(Q, BLOCK, CHUNK)), J, part, CHUNK, BLOCK, scales)
    ROWS: gl.constexpr = scale.shape[0]
    COLS: gl.constexpr = scale.shape[2]
    shape: gl.constexpr = (ROWS, HALF // ROWS, COLS, CHUNK // COLS)
    c = gl.fma(sums.to(gl.float32).reshape(shape), scale, c.reshape(shape))
    return gl.convert_layout(c.reshape((HALF, CHUNK)), layout, assert_trivial=True)


@gluon.jit
def multiply_stage(
    parts,
    a,
    b,
    s_smem,
    at,
    J: gl.constexpr,
    BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
    layout: gl.constexpr,
    scales: gl.constexpr,
):
    """Add a stage's products to the parts.

    With chunks of 64, one product is promoted while the next is on its way.
    """
    LAST: gl.constexpr = parts_of(CHUNK) * (WIDE // BLOCK) - 1
    token = issue(a, b, 0, BLOCK, CHUNK, layout)
    for q in gl.static_range(LAST + 1):
        if CHUNK == 64 and q < LAST:
            after = issue(a, b, q + 1, BLOCK, CHUNK, layout)
            sums = warpgroup_mma_wait(1, deps=(token,))
            token = after
        else:
            sums = warpgroup_mma_wait(0, deps=(token,))
        new = promote(
            parts[part_of(q, BLOCK, CHUNK)], sums, s_smem, at, J, q, BLOCK, layout, scales
        )
        before, rest = parts[: part_of(q, BLOCK, CHUNK)], parts[part_of(q, BLOCK, CHUNK) + 1 :]
        parts = before + (new,) + rest
        if CHUNK != 64 and q < LAST:
            token = issue(a, b, q + 1, BLOCK, CHUNK, layout)
    return parts


@gluon.jit
def consume(
    a_smem,
    b_smem,
    s_smem,
    full,
    empty,
    bias_ptr,
    c_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    K,
    J: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK: gl.constexpr,
    OUT_BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
    BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    INT8: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
):
    """Compute columns J·128 … J·128+127 of every tile of this program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 32])
    ROWS: gl.constexpr = max(HALF // BLOCK, 1)
    COLS: gl.constexpr = max(CHUNK // BLOCK, 1)
    blocked: gl.constexpr = (
        gl.zeros((HALF, CHUNK), gl.float32, layout)
        .reshape((ROWS, HALF // ROWS, COLS, CHUNK // COLS))
        .type.layout
    )
    scales: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, blocked))
    PARTS: gl.constexpr = parts_of(CHUNK)
    tiles = gl.cdiv(M, WIDE) * gl.cdiv(N, WIDE * CONSUMERS)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_row, tile_col = tile_of(tile, M, N, WIDE * CONSUMERS, GROUP)
        row0 = tile_row * WIDE
        col0 = (tile_col * CONSUMERS + J) * WIDE
        parts = ()
        for _part in gl.static_range(PARTS):
            parts = parts + (gl.zeros((HALF, CHUNK), gl.float32, layout),)
        for _step in range(gl.cdiv(K, WIDE)):
            mbarrier.wait(full.index(slot), phase)
            parts = multiply_stage(
                parts,
                a_smem.index(slot),
                b_smem.index(slot * CONSUMERS + J),
                s_smem,
                slot * (WIDE // BLOCK),
                J,
                BLOCK,
                CHUNK,
                layout,
                scales,
            )
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        finish(
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
            OUT_BLOCK,
            BIAS,
            ACCUMULATE,
            INT8,
            LAYOUT,
            STOCHASTIC,
        )


@gluon.jit
def gemm_kernel(
    a_desc,
    b_desc,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    c_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    seed_ptr,
    M,
    N,
    K,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK: gl.constexpr,
    OUT_BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
    REGISTERS: gl.constexpr,
    BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    INT8: gl.constexpr,
    LAYOUT: gl.constexpr,
    STOCHASTIC: gl.constexpr,
):
    """Compute every num_programs-th tile of 128×256 per program."""
    CONSUMERS: gl.constexpr = 2
    COUNT: gl.constexpr = WIDE // BLOCK
    a_smem = gl.allocate_shared_memory(gl.int8, [STAGES, WIDE, WIDE], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.int8, [STAGES * CONSUMERS, WIDE, WIDE], b_desc.layout)
    s_smem = gl.allocate_shared_memory(
        gl.float32,
        [STAGES * COUNT, COUNT, CONSUMERS * COUNT],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # TMA's bytes, and the scales
        mbarrier.init(empty.index(i), count=CONSUMERS)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    a_smem,
                    b_smem,
                    s_smem,
                    full,
                    empty,
                    bias_ptr,
                    c_ptr,
                    q_ptr,
                    scale_ptr,
                    qt_ptr,
                    scale_t_ptr,
                    seed_ptr,
                    M,
                    N,
                    K,
                    0,
                    CONSUMERS,
                    STAGES,
                    GROUP,
                    BLOCK,
                    OUT_BLOCK,
                    CHUNK,
                    BIAS,
                    ACCUMULATE,
                    INT8,
                    LAYOUT,
                    STOCHASTIC,
                ),
            ),
            (
                consume,
                (
                    a_smem,
                    b_smem,
                    s_smem,
                    full,
                    empty,
                    bias_ptr,
                    c_ptr,
                    q_ptr,
                    scale_ptr,
                    qt_ptr,
                    scale_t_ptr,
                    seed_ptr,
                    M,
                    N,
                    K,
                    1,
                    CONSUMERS,
                    STAGES,
                    GROUP,
                    BLOCK,
                    OUT_BLOCK,
                    CHUNK,
                    BIAS,
                    ACCUMULATE,
                    INT8,
                    LAYOUT,
                    STOCHASTIC,
                ),
            ),
            (
                produce,
                (
                    a_desc,
                    b_desc,
                    a_smem,
                    b_smem,
                    s_smem,
                    full,
                    empty,
                    a_scale_ptr,
                    b_scale_ptr,
                    M,
                    N,
                    K,
                    CONSUMERS,
                    STAGES,
                    GROUP,
                    BLOCK,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],  # of the 168 that each of 12 warps starts with
    )
