"""AdamW with INT8 moments, and the new weight's codes: a slice of a tile per program, one pass.

A block's scale is known once all its slices are updated. No program waits for it: the last of a
tile to end reads the new weight again, from the L2 cache, and writes the codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.core.workspace import counters
from jetfire.kernels_triton.adamw import (
    SLICES,
    AdamwConfig,
    bias_correction,
    inside,
    scalars,
    slices_reason,
    store_both,
    store_codes,
)
from jetfire.kernels_triton.common import (
    INTERPRETED,
    STREAM_ROUNDING,
    block_reduce_amax,
    block_scales,
    max_nan,
    random_u16,
    tile_codes,
)
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    REGISTER_SPACE,
    TileKernel,
    load_tile,
    register_limit,
    store_tile,
    tile_grid,
)


@dataclass(frozen=True)
class Adamw8Config(AdamwConfig):
    """As of AdamW; of a tile in slices, `stages` parts of the new weights are read at once.

    With more than one they pass through shared memory, while the one before is rounded.
    """

    stages: int = 1


STAGED_BYTES = 36 << 10  # shared memory of a program with three stages
GROUP = tl.constexpr(128)  # numbers of a row that share a scale, as in jetfire.reference.adamw8


@triton.jit
def each(scales):
    """Repeat each group's value at each of its elements: [R, C/128] → [R, C]."""
    shape: tl.constexpr = (scales.shape[0], scales.shape[1], GROUP)
    wide = tl.broadcast_to(scales[:, :, None], shape)
    return tl.reshape(wide, (scales.shape[0], scales.shape[1] * GROUP))


@triton.jit
def in_units(roots):
    """Return a tile in units of its groups' scales, at most 127, their multipliers and scales.

    Without a finite scale above 0 the units are 0.
    """
    groups = tl.reshape(tl.abs(roots), (roots.shape[0], roots.shape[1] // GROUP, GROUP))
    if INTERPRETED:  # as in `block_reduce_amax`
        amax = tl.max(tl.where(groups == groups, groups, float("inf")), 2)
    else:
        amax = tl.reduce(groups, 2, max_nan)
    scale, multiplier = block_scales(amax)
    wide = each(multiplier)
    return tl.where(wide != 0, roots * wide, 0.0), wide, scale


@triton.jit
def nearest(units):
    """Round units, at most 127 in size, to int8, ties to even."""
    return ((units + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def narrowed(x, seed, row0, col0):
    """Round an fp32 tile at (row0, col0) to bf16 as jetfire.reference.adamw8.narrowed does."""
    bits = random_u16(seed, row0, col0, x.shape[0], x.shape[1], STREAM_ROUNDING)
    top = tl.add(x.to(tl.uint32, bitcast=True), bits.to(tl.uint32), sanitize_overflow=False) >> 16
    top = tl.where(x == x, top, 0x7FC0)
    return top.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def stepped(p, g, y, z, m_scale, v_scale, beta1, beta2, eps, shrink, size, root, within):
    """Return a tile's new parameter, then each moment's codes and its groups' scales.

    Args:
        p, g: the parameter and its gradient, fp32.
        y, z: codes of both moments, whose groups have m_scale and v_scale.
        shrink: rate·decay.
        size, root: rate/(1 − beta1^t) and (1 − beta2^t)^-½.
        within: the mask of what lies within the matrix; None where all does.
    """
    y = y.to(tl.float32) * each(m_scale)
    z = (z.to(tl.float32) + 127.0) * each(v_scale * 0.5)
    m = (y * tl.abs(y)) * beta1 + g * (1.0 - beta1)
    v = (z * z) * (z * z) * beta2 + g * g * (1.0 - beta2)
    if within is not None:  # beyond the edges a code of 0 stands for no 0 of the second moment
        v = tl.where(within, v, 0.0)
    s = tl.sqrt_rn(v)
    new = tl.fma(p, -shrink, p) - size * m / tl.fma(s, root, eps)
    y = tl.sqrt_rn(tl.abs(m))
    m_units, _, m_scale = in_units(tl.where(m < 0, -y, y))
    v_units, alive, v_scale = in_units(tl.sqrt_rn(s))
    m_codes = nearest(m_units)
    v_codes = nearest(tl.where(alive != 0, tl.maximum(v_units * 2.0 - 127.0, -126.0), 0.0))
    return new, m_codes, m_scale, v_codes, v_scale


@triton.jit
def last(counter_ptr, p, SLICES: tl.constexpr):
    """Add a slice p to its tile's largest by block; return whether all slices are in them.

    Args:
        counter_ptr: how many slices of the tile are, then the bits of each block's largest: as
            integers they have the order of numbers from 0 on, ∞ and then NaN.
    """
    amax = block_reduce_amax(p, p.shape[0])
    at = counter_ptr + 1 + tl.arange(0, amax.shape[1])[None, :] // SLICES
    tl.atomic_max(at, amax.to(tl.int32, bitcast=True), sem="relaxed")
    tl.debug_barrier()  # the release of one thread is to be of what all have written
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SLICES - 1


@triton.jit
def largest(counter_ptr, BLOCKS: tl.constexpr):
    """Return a tile's largest by block, fp32 [1, BLOCKS], and leave zeros."""
    tl.store(counter_ptr, 0)
    at = counter_ptr + 1 + tl.arange(0, BLOCKS)[None, :]
    found = tl.atomic_xchg(at, tl.zeros((1, BLOCKS), tl.int32), sem="relaxed")
    return found.to(tl.float32, bitcast=True)


@triton.jit
def load_fresh(ptr, row0, col0, M, N, R: tl.constexpr, C: tl.constexpr):
    """Load a tile that other SMs have written, from the L2 cache, four numbers at a time.

    That is as `store_codes` writes it: more of bf16 would pass through shared memory.
    """
    rows = row0 + tl.arange(0, R)
    cols = tl.max_contiguous(col0 + tl.arange(0, C), 4)
    at = ptr + (rows.to(tl.int64)[:, None] * N + cols[None, :])
    return tl.load(at, mask=inside(row0, col0, M, N, R, C), other=0, cache_modifier=".cg")


@triton.jit
def adamw8_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_ptr,
    exp_avg_sq_scale_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    rate_ptr,
    step_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    seed_ptr,
    counter_ptr,
    M,
    N,
    stride,
    beta1,
    beta2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    GUARDED: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
):
    across, place = tl.num_programs(0) // SLICES, tl.program_id(0) // SLICES
    down = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    row0, col0 = down * TILE_M, place * TILE_N
    R: tl.constexpr = TILE_M // SLICES
    first = row0 + tl.program_id(0) % SLICES * R  # of this program's slice
    GROUPS: tl.constexpr = TILE_N // GROUP
    groups, group0 = tl.cdiv(N, GROUP), col0 // GROUP
    p = load_tile(param_ptr, first, col0, M, N, N, R, TILE_N).to(tl.float32)
    g = load_tile(grad_ptr, first, col0, M, N, stride, R, TILE_N).to(tl.float32)
    y = load_tile(exp_avg_ptr, first, col0, M, N, N, R, TILE_N)
    z = load_tile(exp_avg_sq_ptr, first, col0, M, N, N, R, TILE_N)
    m_scale = load_tile(exp_avg_scale_ptr, first, group0, M, groups, groups, R, GROUPS)
    v_scale = load_tile(exp_avg_sq_scale_ptr, first, group0, M, groups, groups, R, GROUPS)
    # After the loads: these some 150 instructions on scalars pass while tiles are on their way.
    rate, step = tl.load(rate_ptr), tl.load(step_ptr)
    seed = tl.load(seed_ptr) if DTYPE == "bf16" else 0
    size = tl.div_rn(rate, bias_correction(step, log_beta1))
    root = tl.div_rn(1.0, tl.sqrt_rn(bias_correction(step, log_beta2)))
    if GUARDED:
        failed = tl.load(found_inf_ptr) != 0
        g *= tl.div_rn(1.0, tl.load(grad_scale_ptr))
    within = None if EVEN else inside(first, col0, M, N, R, TILE_N)
    new, m_codes, m_scale, v_codes, v_scale = stepped(
        p, g, y, z, m_scale, v_scale, beta1, beta2, eps, rate * decay, size, root, within
    )
    # Rows that are to stay lie, as it were, beyond the matrix.
    rows = M
    if GUARDED:
        new = tl.where(failed, p, new)
        rows = tl.where(failed, 0, M)
    p = new
    if DTYPE == "bf16":
        new = narrowed(new, seed, first, col0)
        p = new.to(tl.float32)
    tl.debug_barrier()  # a scale is read by all threads that hold its group, and written by one
    store_codes(exp_avg_ptr, m_codes, first, col0, rows, N)
    store_codes(exp_avg_sq_ptr, v_codes, first, col0, rows, N)
    store_tile(exp_avg_scale_ptr, m_scale, first, group0, rows, groups, groups)
    store_tile(exp_avg_sq_scale_ptr, v_scale, first, group0, rows, groups, groups)
    store_tile(param_ptr, new, first, col0, rows, N, N)
    if not EVEN:  # without an eps the padding's 0/0 would be in its block's amax
        p = tl.where(within, p, 0.0)
    if LAYOUT != "none":
        if SLICES == 1:
            scale, multiplier = block_scales(block_reduce_amax(p, BLOCK))
            q = tile_codes(p, multiplier, 0, row0, col0, BLOCK, False)
            store_both(q, q_ptr, qt_ptr, row0, col0, M, N, LAYOUT)
        else:
            counter_ptr += (down * across + place).to(tl.int64) * (1 + TILE_N // BLOCK)
            if not last(counter_ptr, p, SLICES):
                return
            scale, multiplier = block_scales(largest(counter_ptr, TILE_N // BLOCK))
            PART: tl.constexpr = max(R, 32)  # rows at once: of a transpose no less than a sector
            parts: tl.constexpr = (1, TILE_N // BLOCK, BLOCK // PART)
            wide = tl.reshape(tl.broadcast_to(multiplier[:, :, None], parts), (1, TILE_N // PART))
            for part0 in tl.range(row0, row0 + BLOCK, PART, num_stages=STAGES):
                fresh = load_fresh(param_ptr, part0, col0, M, N, PART, TILE_N).to(tl.float32)
                q = tile_codes(fresh, wide, 0, part0, col0, PART, False)
                store_both(q, q_ptr, qt_ptr, part0, col0, M, N, LAYOUT)
        blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
        row, col = row0 // BLOCK, col0 // BLOCK
        if LAYOUT != "qt":
            store_tile(scale_ptr, scale, row, col, blocks_m, blocks_n, blocks_n)
        if LAYOUT != "q":
            store_tile(scale_t_ptr, tl.trans(scale), col, row, blocks_n, blocks_m, blocks_m)


class TritonAdamw8(TileKernel):
    """Each slice of a tile has a program of `warps` warps."""

    op = "adamw8"
    Config = Adamw8Config
    choices: ClassVar = {
        **REGISTER_SPACE,
        "tile_n": (128, 256, 512, 1024),
        "slices": SLICES,
        "stages": (1, 2, 3),
    }

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        if config.tile_n % GROUP.value:
            return f"tile_n={config.tile_n}: expected a multiple of the moments' 128"
        if config.stages > 1 and (config.slices == 1 or config.stages > 3):
            return f"stages={config.stages}: expected 1, or 2 or 3 of a tile in slices"
        if config.stages > 1 and config.tile_n > 256:  # 64 KiB of shared memory
            return f"stages={config.stages} tile_n={config.tile_n}: expected tile_n of at most 256"
        return slices_reason(problem, config) or super().legal(problem, config, device)

    def default(self, problem: Any, device: Device) -> Adamw8Config:
        """Return programs of eight elements per thread and 64 registers: 32 warps of an SM.

        Blocks of 32, 64 and 128 took 451, 497 and 497 µs, 89, 81 and 81% of a copy's bandwidth
        (4096×16384, H100); one of 128 as a single program had 73%. Square roots without the branch
        of `sqrt.rn`, to the same bits, changed that to 454, 490 and 496 µs: nothing gained.

        That was with one stage. Of ten weights of GPT-2 in blocks of 128 nine took 2 to 6% less
        time with three, in the same tiles; 4096×16384 took 3% less with two (the H100's profiles).
        Where the four programs of an SM have no room for three it is one.

        Larger blocks have smaller slices, so that more programs overlap, unless the transpose's
        rows are not of whole vectors: with 16 elements per thread their codes would take more
        registers. So do rows that are not, for as many addresses. For Blackwell 64 leave spills.
        """
        block, registers = problem.block, 80 if (device.capability or (0, 0)) >= (10, 0) else 64
        if problem.n % 16:
            return Adamw8Config(block, 128, 8, 255, slices=block // 16)
        rows = 16 if block > 32 and problem.m % 16 == 0 else 32
        slices = block // rows
        stages = 3 if slices > 1 and device.shared_bytes >= 4 * STAGED_BYTES else 1
        return Adamw8Config(block, 128, rows // 2, registers, slices=slices, stages=stages)

    def launches(self, problem: Any, config: AdamwConfig, device: Device) -> tuple[Launch, ...]:
        """Step in place: outputs hold the parameter and its moments before it and after it."""
        across, down, deep = tile_grid(problem.m, problem.n, config)
        grid = across * config.slices, down, deep
        even = problem.m % config.tile_m == problem.n % config.tile_n == 0
        given = {**scalars(problem), **EXACT, **register_limit(config), "EVEN": even}
        return (Launch(adamw8_kernel, grid, problem, config, {"stride": "grad"}, **given),)

    def tensors(
        self, problem: Any, config: Adamw8Config, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        if config.slices == 1 or not problem.quantises:
            return {**inputs, **outputs}
        tiles = math.prod(tile_grid(problem.m, problem.n, config))
        count = tiles * (1 + config.tile_n // problem.block)
        return {**inputs, **outputs, "counter": counters(inputs["param"].device, count)}


KERNELS = (TritonAdamw8(),)
