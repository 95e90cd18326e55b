"""Host code that GEMMs in mma.sync share: how a tile is cut and fed, and whether that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin

if TYPE_CHECKING:
    import torch

TILE_BYTES = 128  # bytes of K in a slot
RESERVED_BYTES = 1024  # shared memory that the system takes in a block (CUDA 11 and later)


@dataclass(frozen=True)
class TileConfig(Config):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps_m, warps_n: warps among which they are divided.
        stages: buffers of 128 bytes of K in shared memory.
        blocks: blocks that an SM is to hold: each has as many registers as that leaves.
        raster: rows of tiles that are walked column by column.
    """

    tile_m: int = 128
    tile_n: int = 128
    warps_m: int = 2
    warps_n: int = 4
    stages: int = 3
    blocks: int = 1
    raster: int = 8

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def sums(self) -> int:
        """Sums of a thread, of 32 bits each."""
        return self.warp_m * self.warp_n // 32

    @property
    def registers(self) -> int:
        """Registers of a thread, of which an SM's 65536 hold as many blocks as are wanted."""
        return min(255, 65536 // (32 * self.warps * self.blocks) // 8 * 8)

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory of all stages."""
        return self.stages * (self.tile_m + self.tile_n) * TILE_BYTES

    def tiles(self, m: int, n: int) -> int:
        """Count the tiles of an m×n output, which are the blocks of a launch."""
        return ceil_div(m, self.tile_m) * ceil_div(n, self.tile_n)


SPACE: dict[str, Sequence[Any]] = {
    "tile_m": (32, 64, 128, 256),
    "tile_n": (32, 64, 128, 256),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
    "stages": (2, 3, 4, 5, 6),
    "blocks": (1, 2, 3),
    "raster": (1, 2, 4, 8, 16, 32),
}


# --- alignment -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileAccess:
    """Choices that the tensors' alignment decides.

    Attributes:
        copy_bytes: bytes that one copy of A or B moves: 16, 8, 4, or 1 for any alignment.
        out: the output is written in 16 bytes.
    """

    copy_bytes: int = 16
    out: bool = True


def places(x: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's rows begin: the first, in bytes, and how far apart."""
    return x.data_ptr(), x.stride(0) * x.itemsize


def copy_bytes(*places: int) -> int:
    """Return how many bytes a copy may move of rows that begin at sums of multiples of these."""
    size = math.gcd(16, *places)
    return size if size >= 4 else 1  # cp.async has no 2


def aligned(x: torch.Tensor | None) -> bool:
    """Return whether a tensor's rows can be written in 16 bytes."""
    return x is not None and copy_bytes(*places(x)) == 16


# --- legality ------------------------------------------------------------------------------------


def unsupported(device: Device) -> str | None:
    """Return why the device cannot run any config."""
    if device.kind != "cuda" or device.capability is None or device.capability < (8, 0):
        return "needs a GPU of sm_80 or later: it is written in mma.sync and cp.async"
    return driver.missing()


def outside(config: TileConfig, space: Mapping[str, Sequence[Any]]) -> str | None:
    """Return which field has a value that is not in the space."""
    for name, values in space.items():
        if getattr(config, name) not in values:
            return f"{name}={getattr(config, name)}: expected one of {values}"
    return None


def misfit(config: TileConfig) -> str | None:
    """Return why the tile does not suit its warps."""
    if config.warps < 4:
        return f"{config.warps} warps: expected at least 4, one for each scheduler"
    for name, size, share in (
        ("tile_m", config.tile_m, config.warp_m),
        ("tile_n", config.tile_n, config.warp_n),
    ):
        if not 16 <= share <= 64:
            return f"{name}={size}: {share} a warp, expected 16 to 64"
        if size < 4 * config.warps:
            return f"{name}={size}: expected at least 4 rows a warp to fetch"
    return None


def spilling(config: TileConfig, needed: int) -> str | None:
    """Return why a thread that needs so many registers does not have them."""
    if needed > (limit := config.registers):
        return f"needs {needed} registers per thread: blocks={config.blocks} of them leave {limit}"
    return None


def too_large(m: int, n: int, config: TileConfig, shared_bytes: int, device: Device) -> str | None:
    """Return why blocks of so much shared memory do not fit an SM, or m×n the grid."""
    needed = shared_bytes + (config.blocks - 1) * (shared_bytes + RESERVED_BYTES)
    if needed > device.shared_bytes:
        return (
            f"{needed} bytes of shared memory for blocks={config.blocks}: {device.label} has "
            f"{device.shared_bytes}"
        )
    return "more than 2^30 tiles" if config.tiles(m, n) >= 2**30 else None


# --- code ----------------------------------------------------------------------------------------


def tile_constants(config: TileConfig, access: TileAccess) -> dict[str, bool | int]:
    """Return the constants of `mma_tiles.cuh`, and how the output is written."""
    return {
        "COPY_BYTES": access.copy_bytes,
        "VECTOR_OUT": access.out,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "STAGES": config.stages,
        # Bytes that lie anywhere take registers to put in place.
        "MIN_BLOCKS": config.blocks if access.copy_bytes > 1 else 1,
        "RASTER": config.raster,
    }


def compiled(source: Path, header: str, capability: tuple[int, int]) -> bytes:
    major, minor = capability
    return compile_cubin(source, header, f"sm_{major}{minor}")


@lru_cache(maxsize=2048)
def loaded(
    source: Path, name: str, header: str, shared_bytes: int, device: Device
) -> driver.Function:
    """Load the kernel once for all shapes that have the same code."""
    assert device.capability is not None
    code = compiled(source, header, device.capability)
    return driver.Function(code, name, device.index, shared_bytes)
