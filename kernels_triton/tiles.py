"""Tiles of the elementwise Triton kernels, one per program: configs, legality, masked access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import triton
import triton.language as tl

from jetfire.core.device import SM_REGISTERS, Device
from jetfire.core.kernel import Config
from jetfire.core.problem import written_block
from jetfire.core.tensors import ceil_div
from jetfire.kernels_triton.kernel import TritonKernel


@dataclass(frozen=True)
class TileConfig(Config):
    """A tile_m×tile_n tile of the output for each program of `warps` warps."""

    tile_m: int = 32
    tile_n: int = 128
    warps: int = 4


@dataclass(frozen=True)
class RegisterConfig(TileConfig):
    """A tile whose programs take at most `registers` registers per thread, so more run at once.

    Below what a tile needs the compiler spills, which is slower.
    """

    registers: int = 255


WARPS = (1, 2, 4, 8, 16, 32)
TILE_SPACE: dict[str, Sequence[Any]] = {
    "tile_m": (32, 64, 128, 256),
    "tile_n": (32, 64, 128, 256, 512, 1024),
    "warps": (1, 2, 4, 8, 16),
}
REGISTER_SPACE: dict[str, Sequence[Any]] = {**TILE_SPACE, "registers": (48, 56, 64, 72, 96, 255)}


def device_reason(device: Device) -> str | None:
    """Return why Triton kernels do not run on a device, or None."""
    if device.kind == "cpu":
        return None if device.interpreted else "needs a CUDA device, or TRITON_INTERPRET=1"
    if device.capability is not None and device.capability < (8, 0):
        return f"needs sm_80 or newer, this is sm_{device.capability[0]}{device.capability[1]}"
    return None


def power_reason(
    config: Config,
    *names: str,
    expected: str = "a power of two",
    least: int = 1,
    most: float = math.inf,
    multiple: int = 1,
) -> str | None:
    """Return which field of a config is no power of two, or is out of bounds, or None."""
    for name in names:
        size = getattr(config, name)
        if size % multiple or size & (size - 1) or not least <= size <= most:
            return f"{name}={size}: expected {expected}"
    return None


def warps_reason(config: Any, most: int = 16) -> str | None:
    """Return why a config's warps are no power of two of at most so many, or None."""
    *others, last = (str(warps) for warps in WARPS if warps <= most)
    expected = f"{', '.join(others)} or {last}"
    return power_reason(config, "warps", expected=expected, most=most)


def share_reason(
    count: int, config: Any, least: int, most: int, of: str = "elements"
) -> str | None:
    """Return why so many elements, shared by a config's threads, are too few or too many each."""
    each = count // (32 * config.warps)
    return None if least <= each <= most else f"{each} {of} per thread: expected {least} to {most}"


def grid_reason(count: int, expected: str = "larger tiles", of: str = "tiles") -> str | None:
    """Return why a launch of so many programs is illegal, or None."""
    return f"more than 2^31 {of}: expected {expected}" if count >= 2**31 else None


def registers_each(config: TileConfig) -> int:
    """Return how many registers an SM has for each thread of a program."""
    return SM_REGISTERS // (32 * config.warps)


def register_reason(config: TileConfig) -> str | None:
    """Return why a config's register limit, where it has one, is illegal."""
    if not isinstance(config, RegisterConfig):
        return None
    # ptxas takes 24 at the least; 255 is the most that a thread can have.
    if not 24 <= config.registers <= 255:
        return f"registers={config.registers}: expected 24 to 255"
    if registers_each(config) < config.registers < 255:
        held = f"registers={config.registers} warps={config.warps}"
        return f"{held}: an SM has {SM_REGISTERS} registers"
    return None


def tile_reason(
    m: int, n: int, block: int, config: TileConfig, device: Device, most: int = 64
) -> str | None:
    """Return why a tile of at most `most` elements per thread is illegal for m×n, or None."""
    expected = f"a power of two that is a multiple of {block}"
    return (
        register_reason(config)
        or device_reason(device)
        or power_reason(config, "tile_m", "tile_n", expected=expected, multiple=block)
        or warps_reason(config, 32)
        or share_reason(config.tile_m * config.tile_n, config, 1, most)
        or grid_reason(tile_count(m, n, config))
    )


def register_limit(config: RegisterConfig) -> dict[str, int]:
    """Return the launch option of a limit; none at 255, which a tile of 16 warps could not have."""
    return {"maxnreg": config.registers} if config.registers < 255 else {}


def at_most(registers: int, config: TileConfig) -> dict[str, int]:
    """Return the launch option that limits a thread to so many registers.

    Where an SM has fewer for each, that is the limit: a program whose threads take more cannot
    start.
    """
    return {"maxnreg": min(registers, registers_each(config))}


class TileKernel(TritonKernel):
    """A kernel whose programs each write a tile."""

    Config: ClassVar[type[Any]] = TileConfig
    choices = TILE_SPACE

    def side(self, problem: Any) -> int:
        """Return the side of the blocks of which tiles are made: the larger of those of codes."""
        return max(problem.block, written_block(problem))

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        return tile_reason(problem.m, problem.n, self.side(problem), config, device)


def tile_count(m: int, n: int, config: Any) -> int:
    """Count the tiles of an m×n matrix."""
    return ceil_div(m, config.tile_m) * ceil_div(n, config.tile_n)


@triton.jit
def tile_origin(N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return first row and column of this program's tile, tiles numbered along rows."""
    across = tl.cdiv(N, TILE_N)
    pid = tl.program_id(0)
    return pid // across * TILE_M, pid % across * TILE_N


def tile_grid(m: int, n: int, config: TileConfig) -> tuple[int, int, int]:
    """Return the launch grid whose programs find their tile by `grid_origin`, without a division.

    Tiles along a row are neighbours in launch order; CUDA takes at most 65535 along y, so rows of
    tiles go on along z, where the last may lie beyond the matrix.
    """
    down = ceil_div(m, config.tile_m)
    deep = ceil_div(down, 65535)
    return ceil_div(n, config.tile_n), ceil_div(down, deep), deep


@triton.jit
def grid_origin(TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return first row and column of this program's tile in a `tile_grid`."""
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return row * TILE_M, tl.program_id(0) * TILE_N


@triton.jit
def tile_of(pid, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Return a program's tile row and column: GROUP rows of tiles at a time, to stay in L2."""
    down, across = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    first = pid // (GROUP * across) * GROUP
    rows = tl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    return first + within % rows, within // rows


@triton.jit
def load_tile(ptr, row0, col0, M, N, stride, R: tl.constexpr, C: tl.constexpr):
    """Load the R×C tile at (row0, col0) of an M×N matrix, 0 beyond its edges; 64-bit offsets."""
    rows = row0 + tl.arange(0, R)
    cols = col0 + tl.arange(0, C)
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(ptr + offsets, mask=(rows < M)[:, None] & (cols < N)[None, :], other=0)


@triton.jit
def store_tile(ptr, tile, row0, col0, M, N, stride):
    """Write the part of a tile at (row0, col0) that lies within an M×N matrix."""
    rows = row0 + tl.arange(0, tile.shape[0])
    cols = col0 + tl.arange(0, tile.shape[1])
    offsets = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(ptr + offsets, tile, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def store_quantised(
    q,
    scale,
    q_ptr,
    scale_ptr,
    qt_ptr,
    scale_t_ptr,
    row0,
    col0,
    M,
    N,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write a tile's codes and scales, their transposes, or both, as LAYOUT (q, qt, both) says.

    Outputs are contiguous.
    """
    blocks_m, blocks_n = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    if LAYOUT != "qt":
        store_tile(q_ptr, q, row0, col0, M, N, N)
        store_tile(scale_ptr, scale, row0 // BLOCK, col0 // BLOCK, blocks_m, blocks_n, blocks_n)
    if LAYOUT != "q":
        store_tile(qt_ptr, tl.trans(q), col0, row0, N, M, M)
        store_tile(
            scale_t_ptr, tl.trans(scale), col0 // BLOCK, row0 // BLOCK, blocks_n, blocks_m, blocks_m
        )
