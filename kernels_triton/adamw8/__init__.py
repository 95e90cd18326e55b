"""AdamW with INT8 moments, and the new weight's codes: one tile per program, one pass."""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.adamw import (
    AdamwConfig,
    TritonAdamw,
    bias_correction,
    inside,
    scalars,
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
    grid_origin,
    load_tile,
    register_limit,
    store_tile,
    tile_grid,
)

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
def stepped(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_ptr,
    exp_avg_sq_scale_ptr,
    row0,
    col0,
    M,
    N,
    stride,
    beta1,
    beta2,
    eps,
    shrink,
    size,
    root,
    inverse,
    failed,
    seed_ptr,
    R: tl.constexpr,
    C: tl.constexpr,
    GUARDED: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Update the R×C tile at (row0, col0) of the parameter and its moments; return the parameter.

    Args:
        shrink: rate·decay.
        size, root: rate/(1 − beta1^t) and (1 − beta2^t)^-½.
        inverse: of grad_scale.
        failed: nothing changes.
        seed_ptr: what a parameter in bf16, which DTYPE says, is rounded by.
    """
    GROUPS: tl.constexpr = C // GROUP
    across, group0 = tl.cdiv(N, GROUP), col0 // GROUP
    p = load_tile(param_ptr, row0, col0, M, N, N, R, C)
    g = load_tile(grad_ptr, row0, col0, M, N, stride, R, C)
    if DTYPE == "bf16":
        p, g = p.to(tl.float32), g.to(tl.float32)
    if GUARDED:
        g *= inverse
    m_scale = load_tile(exp_avg_scale_ptr, row0, group0, M, across, across, R, GROUPS)
    v_scale = load_tile(exp_avg_sq_scale_ptr, row0, group0, M, across, across, R, GROUPS)
    y = load_tile(exp_avg_ptr, row0, col0, M, N, N, R, C).to(tl.float32) * each(m_scale)
    z = load_tile(exp_avg_sq_ptr, row0, col0, M, N, N, R, C).to(tl.float32) + 127.0
    z *= each(v_scale * 0.5)
    m = (y * tl.abs(y)) * beta1 + g * (1.0 - beta1)
    v = (z * z) * (z * z) * beta2 + g * g * (1.0 - beta2)
    if not EVEN:  # beyond the edges a code of 0 stands for no 0 of the second moment
        v = tl.where(inside(row0, col0, M, N, R, C), v, 0.0)
    s = tl.sqrt_rn(v)
    new = tl.fma(p, -shrink, p) - size * m / tl.fma(s, root, eps)
    y = tl.sqrt_rn(tl.abs(m))
    m_units, _, m_scale = in_units(tl.where(m < 0, -y, y))
    v_units, alive, v_scale = in_units(tl.sqrt_rn(s))
    m_codes = nearest(m_units)
    v_codes = nearest(tl.where(alive != 0, tl.maximum(v_units * 2.0 - 127.0, -126.0), 0.0))
    # Rows that are to stay lie, as it were, beyond the matrix.
    rows = M
    if GUARDED:
        new = tl.where(failed, p, new)
        rows = tl.where(failed, 0, M)
    kept = new
    if DTYPE == "bf16":
        kept = narrowed(new, tl.load(seed_ptr), row0, col0)
        new = kept.to(tl.float32)
    tl.debug_barrier()  # a scale is read by all threads that hold its group, and written by one
    store_codes(exp_avg_ptr, m_codes, row0, col0, rows, N)
    store_codes(exp_avg_sq_ptr, v_codes, row0, col0, rows, N)
    store_tile(exp_avg_scale_ptr, m_scale, row0, group0, rows, across, across)
    store_tile(exp_avg_sq_scale_ptr, v_scale, row0, group0, rows, across, across)
    store_tile(param_ptr, kept, row0, col0, rows, N, N)
    if not EVEN:  # without an eps the padding's 0/0 would be in its block's amax
        new = tl.where(inside(row0, col0, M, N, R, C), new, 0.0)
    return new


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
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
):
    row0, col0 = grid_origin(TILE_M, TILE_N)
    rate = tl.load(rate_ptr)
    step = tl.load(step_ptr)
    size = tl.div_rn(rate, bias_correction(step, log_beta1))
    root = tl.div_rn(1.0, tl.sqrt_rn(bias_correction(step, log_beta2)))
    inverse = 1.0
    failed = False
    if GUARDED:
        inverse = tl.div_rn(1.0, tl.load(grad_scale_ptr))
        failed = tl.load(found_inf_ptr) != 0
    R: tl.constexpr = TILE_M // SLICES
    # A block in slices is that many blocks of a slice's rows, which have one scale.
    PART: tl.constexpr = min(BLOCK, R)
    ROWS: tl.constexpr = R // PART
    # The largest of each place of a slice: threads meet once for a block's, not for each slice.
    largest = tl.zeros((R, TILE_N), tl.float32)
    for i in range(SLICES):
        p = stepped(
            param_ptr,
            grad_ptr,
            exp_avg_ptr,
            exp_avg_scale_ptr,
            exp_avg_sq_ptr,
            exp_avg_sq_scale_ptr,
            row0 + i * R,
            col0,
            M,
            N,
            stride,
            beta1,
            beta2,
            eps,
            rate * decay,
            size,
            root,
            inverse,
            failed,
            seed_ptr,
            R,
            TILE_N,
            GUARDED,
            DTYPE,
            EVEN,
        )
        if LAYOUT != "none":
            largest = max_nan(largest, tl.abs(p))
    if LAYOUT != "none":
        amax = block_reduce_amax(largest, PART)
        parts: tl.constexpr = (ROWS, TILE_N // BLOCK, BLOCK // PART)
        scale, multiplier = block_scales(tl.reduce(tl.reshape(amax, parts), 2, max_nan))
        multiplier = tl.reshape(tl.broadcast_to(multiplier[:, :, None], parts), amax.shape)
        tl.debug_barrier()  # threads may read what others have written
        for i in range(SLICES):
            # From the L2 cache: kept in registers, a tile would leave fewer for the update.
            p = load_tile(param_ptr, row0 + i * R, col0, M, N, N, R, TILE_N)
            if DTYPE == "bf16":
                p = p.to(tl.float32)
            q = tile_codes(p, multiplier, 0, row0, col0, PART, False)
            store_both(q, q_ptr, qt_ptr, row0 + i * R, col0, M, N, LAYOUT)
        down, over = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
        row, col = row0 // BLOCK, col0 // BLOCK
        if LAYOUT != "qt":
            store_tile(scale_ptr, scale, row, col, down, over, over)
        if LAYOUT != "q":
            store_tile(scale_t_ptr, tl.trans(scale), col, row, over, down, down)


class TritonAdamw8(TritonAdamw):
    op = "adamw8"
    choices: ClassVar = {**TritonAdamw.choices, "tile_n": (128, 256, 512, 1024)}

    def legal(self, problem: Any, config: AdamwConfig, device: Device) -> str | None:
        if config.tile_n % GROUP.value:
            return f"tile_n={config.tile_n}: expected a multiple of the moments' 128"
        return super().legal(problem, config, device)

    def default(self, problem: Any, device: Device) -> AdamwConfig:
        """Return the fastest of some without spills, of 64 registers per thread.

        A block of 32 as a whole takes 441 µs, 91% of a copy's bandwidth, and 505 in two slices; one
        of 128 in slices of 32 rows 553 µs, 72%, and 630 in slices of 16 (4096×16384, H100). Rows
        that are not of whole vectors take more registers, for as many addresses.
        """
        block = problem.block
        if problem.n % 16:
            return AdamwConfig(block, 128, 8, 255, slices=block // 16)
        warps, registers, slices = {32: (16, 255, 1), 64: (16, 64, 4), 128: (32, 64, 4)}[block]
        return AdamwConfig(block, 128, warps, registers, slices)

    def launches(self, problem: Any, config: AdamwConfig, device: Device) -> tuple[Launch, ...]:
        """Step in place: outputs hold the parameter and its moments before it and after it."""
        grid = tile_grid(problem.m, problem.n, config)
        even = problem.m % config.tile_m == problem.n % config.tile_n == 0
        given = {**scalars(problem), **EXACT, **register_limit(config), "EVEN": even}
        return (Launch(adamw8_kernel, grid, problem, config, {"stride": "grad"}, **given),)


KERNELS = (TritonAdamw8(),)
