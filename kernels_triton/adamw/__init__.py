"""AdamW, and the new weight's codes where wanted: one tile per program, one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import triton
import triton.language as tl

from jetfire.core.device import Device
from jetfire.kernels_triton.common import block_reduce_amax, block_scales, max_nan, tile_codes
from jetfire.kernels_triton.kernel import EXACT, Launch
from jetfire.kernels_triton.tiles import (
    REGISTER_SPACE,
    RegisterConfig,
    TileKernel,
    grid_origin,
    load_tile,
    register_limit,
    store_tile,
    tile_grid,
)

LOG2E = tl.constexpr(1.4426950408889634)
SLICES = (1, 2, 4, 8)
# Of a step that writes no codes, whose tiles may be flat.
ALONE_SPACE: dict[str, Sequence[Any]] = {"tile_m": (1, 2, 4, 8, 16, 32), "slices": (1,)}


@dataclass(frozen=True)
class AdamwConfig(RegisterConfig):
    """Tile, warps and registers, and in how many `slices` a tile is updated.

    A tile of one row of blocks may be done in slices, with fewer registers per thread.

    The new weights are then read again, from the L2 cache, once the block's scale is known.
    """

    slices: int = 1


@triton.jit
def bias_correction(step, log_beta):
    """Return 1 − beta^step from ln(beta), in fp32 to 2^-21 relatively.

    Near 0, where 1 − e^y cancels, it takes the series of e^y − 1: to 1e-7 for y above −1/2.
    """
    y = tl.maximum(step * log_beta, -104.0)
    series = tl.fma(y, 1 / 5040, 1 / 720)
    series = tl.fma(y, series, 1 / 120)
    series = tl.fma(y, series, 1 / 24)
    series = tl.fma(y, series, 1 / 6)
    series = tl.fma(y, series, 0.5)
    series = tl.fma(y, series, 1.0)
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp2(y * LOG2E))


@triton.jit
def inside(row0, col0, M, N, R: tl.constexpr, C: tl.constexpr):
    """Return the mask of what lies within an M×N matrix of the R×C tile at (row0, col0)."""
    rows = row0 + tl.arange(0, R)
    cols = col0 + tl.arange(0, C)
    return (rows < M)[:, None] & (cols < N)[None, :]


@triton.jit
def updated(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
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
    R: tl.constexpr,
    C: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Update the R×C tile at (row0, col0) of the parameter and its moments; return the parameter.

    Args:
        shrink: rate·decay.
        size, root: rate/(1 − beta1^t) and (1 − beta2^t)^-½.
        inverse: of grad_scale.
        failed: nothing changes.
    """
    p = load_tile(param_ptr, row0, col0, M, N, N, R, C)
    g = load_tile(grad_ptr, row0, col0, M, N, stride, R, C)
    m = load_tile(exp_avg_ptr, row0, col0, M, N, N, R, C)
    v = load_tile(exp_avg_sq_ptr, row0, col0, M, N, N, R, C)
    if GUARDED:
        g *= inverse
    m = tl.fma(m, beta1, g * (1.0 - beta1))
    v = tl.fma(v, beta2, g * g * (1.0 - beta2))
    new = tl.fma(p, -shrink, p) - size * m / tl.fma(tl.sqrt(v), root, eps)
    # Rows that are to stay lie, as it were, beyond the matrix.
    rows = M
    if GUARDED:
        new = tl.where(failed, p, new)
        rows = tl.where(failed, 0, M)
    store_tile(exp_avg_ptr, m, row0, col0, rows, N, N)
    store_tile(exp_avg_sq_ptr, v, row0, col0, rows, N, N)
    store_tile(param_ptr, new, row0, col0, rows, N, N)
    # Without an eps the padding's 0/0 would be in its block's amax.
    return tl.where(inside(row0, col0, M, N, R, C), new, 0.0)


@triton.jit
def store_codes(ptr, tile, row0, col0, M, N):
    """Write a tile of int8, as `store_tile` does, four codes at a time.

    Triton gives each thread as many neighbours in the loads as in the widest of its stores, which
    would be 16, but four in a store of fp32: all that is updated would pass through shared memory.
    """
    rows = row0 + tl.arange(0, tile.shape[0])
    cols = tl.max_contiguous(col0 + tl.arange(0, tile.shape[1]), 4)
    offsets = rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(ptr + offsets, tile, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def store_both(q, q_ptr, qt_ptr, row0, col0, M, N, LAYOUT: tl.constexpr):
    """Write codes, their transpose, or both, as LAYOUT (q, qt, both) says."""
    if LAYOUT != "qt":
        store_codes(q_ptr, q, row0, col0, M, N)
    if LAYOUT != "q":
        store_codes(qt_ptr, tl.trans(q), col0, row0, N, M)


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    rate_ptr,
    step_ptr,
    grad_scale_ptr,
    found_inf_ptr,
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
    if SLICES == 1:
        p = updated(
            param_ptr,
            grad_ptr,
            exp_avg_ptr,
            exp_avg_sq_ptr,
            row0,
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
            R,
            TILE_N,
            GUARDED,
        )
        if LAYOUT != "none":
            scale, multiplier = block_scales(block_reduce_amax(p, BLOCK))
            q = tile_codes(p, multiplier, 0, row0, col0, BLOCK, False)
            store_both(q, q_ptr, qt_ptr, row0, col0, M, N, LAYOUT)
    else:
        # A block is that many blocks of R, which have one scale.
        amax = tl.zeros((1, TILE_N // R), tl.float32)
        for i in range(SLICES):
            p = updated(
                param_ptr,
                grad_ptr,
                exp_avg_ptr,
                exp_avg_sq_ptr,
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
                R,
                TILE_N,
                GUARDED,
            )
            amax = max_nan(amax, block_reduce_amax(p, R))
        amax = tl.reduce(tl.reshape(amax, (1, TILE_N // BLOCK, BLOCK // R)), 2, max_nan)
        scale, multiplier = block_scales(amax)
        multiplier = tl.broadcast_to(multiplier[:, :, None], (1, TILE_N // BLOCK, BLOCK // R))
        multiplier = tl.reshape(multiplier, (1, TILE_N // R))
        tl.debug_barrier()  # threads may read what others have written
        for i in range(SLICES):
            p = load_tile(param_ptr, row0 + i * R, col0, M, N, N, R, TILE_N)
            q = tile_codes(p, multiplier, 0, row0, col0, R, False)
            store_both(q, q_ptr, qt_ptr, row0 + i * R, col0, M, N, LAYOUT)
    if LAYOUT != "none":
        blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
        row, col = row0 // BLOCK, col0 // BLOCK
        if LAYOUT != "qt":
            store_tile(scale_ptr, scale, row, col, blocks_m, blocks_n, blocks_n)
        if LAYOUT != "q":
            store_tile(scale_t_ptr, tl.trans(scale), col, row, blocks_n, blocks_m, blocks_m)


def scalars(problem: Any) -> dict[str, float]:
    """Return the kernel's scalars: betas as the nearest fp32, their logarithms, eps and decay.

    The interpreter would not round the betas itself.

    The moments' new shares 1 − beta follow in the kernel, exactly where beta is at least a half: so
    they and the bias corrections are of the same betas.
    """
    found = {"eps": float(problem.eps), "decay": float(problem.decay)}
    for name in ("beta1", "beta2"):
        beta = float(np.float32(getattr(problem, name)))
        found |= {name: beta, f"log_{name}": math.log(beta) if beta else -math.inf}
    return found


def slices_reason(problem: Any, config: AdamwConfig) -> str | None:
    """Return why a tile is not updated in a config's slices, or None."""
    block, slices, rows = problem.block, config.slices, config.tile_m // config.slices
    if slices > 1 and (config.tile_m != block or slices & (slices - 1) or rows < 16):
        return (
            f"slices={slices} tile_m={config.tile_m}: expected 1, or a power of two that leaves"
            f" 16 rows or more of the block's {block}"
        )
    if rows * config.tile_n < 32 * config.warps:
        # Threads that share an element would read it before and after it is updated.
        return f"{rows}×{config.tile_n} of {config.warps} warps: expected an element per thread"
    return None


class TritonAdamw(TileKernel):
    op = "adamw"
    Config = AdamwConfig
    choices: ClassVar = {**REGISTER_SPACE, "slices": SLICES}

    def side(self, problem: Any) -> int:
        """Return the side of the blocks of which tiles are made: 1 where no codes are written."""
        return super().side(problem) if problem.quantises else 1

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        space = super().space(problem, device)
        return space if problem.quantises else {**space, **ALONE_SPACE}

    def legal(self, problem: Any, config: AdamwConfig, device: Device) -> str | None:
        if not problem.quantises and config.slices != 1:
            return f"slices={config.slices}: expected 1 with layout=none"
        return slices_reason(problem, config) or super().legal(problem, config, device)

    def default(self, problem: Any, device: Device) -> AdamwConfig:
        """Return a tile of eight elements per thread at once, of four fp32 each.

        Three programs of 256 threads then fit an SM.

        Rows that are not of whole vectors take more registers, for as many addresses.

        Without codes a warp reads 128 neighbours of a row at once.
        """
        registers = 80 if problem.n % 16 == 0 else 128
        if not problem.quantises:
            return AdamwConfig(16, 128, 8, registers)
        if problem.block == 128:
            # Measured on an H200 at 4096×16384: 561 µs, 8 warps of 80 registers in 8 slices 625.
            return AdamwConfig(128, 128, 16, 128, slices=2)
        return AdamwConfig(problem.block, 64, 8 * problem.block // 32, registers)

    def launches(self, problem: Any, config: AdamwConfig, device: Device) -> tuple[Launch, ...]:
        """Step in place: outputs hold the parameter and its moments before it and after it."""
        grid = tile_grid(problem.m, problem.n, config)
        given = {**scalars(problem), **EXACT, **register_limit(config)}
        return (Launch(adamw_kernel, grid, problem, config, {"stride": "grad"}, **given),)


KERNELS = (TritonAdamw(),)
