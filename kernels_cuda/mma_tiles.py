"""GEMMs in mma.sync: how a tile is cut and fed, whether that fits, and the launch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.device import SM_REGISTERS, Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.program import CudaKernel, Program

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
        """Registers of a thread, of which an SM holds as many blocks as are wanted."""
        return min(255, SM_REGISTERS // (32 * self.warps * self.blocks) // 8 * 8)

    @property
    def ring_bytes(self) -> int:
        """Bytes of shared memory of all stages."""
        return self.stages * (self.tile_m + self.tile_n) * TILE_BYTES

    def tiles(self, m: int, n: int) -> int:
        """Count the tiles of an m×n output, which are the blocks of a launch."""
        return ceil_div(m, self.tile_m) * ceil_div(n, self.tile_n)


# --- alignment -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """Choices that the tensors' alignment decides.

    Attributes:
        copy_bytes: bytes that one copy of A or B moves: 16, 8, 4, or 1 for any alignment.
        out: the output, or its codes, are written in 16 bytes.
        qt: the transposed codes are.
    """

    copy_bytes: int = 16
    out: bool = True
    qt: bool = False


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
            return f"{name}={size}: expected at least 4 rows per warp to fetch"
    return None


def spilling(config: TileConfig, needed: int) -> str | None:
    """Return why a thread that needs so many registers does not have them."""
    if needed > (limit := config.registers):
        return f"needs {needed} registers per thread: blocks={config.blocks} of them leave {limit}"
    return None


# --- the kernel ----------------------------------------------------------------------------------


class MmaKernel(CudaKernel):
    """A GEMM in mma.sync: one block for each tile of the output.

    Attributes:
        source: its `.cu`, whose function has the op's name.
    """

    name = "mma"
    needs = "needs a GPU of sm_80 or later: it is written in mma.sync and cp.async"
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "tile_m": (32, 64, 128, 256),
        "tile_n": (32, 64, 128, 256),
        "warps_m": (1, 2, 4),
        "warps_n": (1, 2, 4),
        "stages": (2, 3, 4, 5, 6),
        "blocks": (1, 2, 3),
        "raster": (1, 2, 4, 8, 16, 32),
    }
    source: ClassVar[Path]

    @abstractmethod
    def row_bytes(self, problem: Any) -> int:
        """Return the bytes of a row of A or B."""

    @abstractmethod
    def shared_bytes(self, problem: Any, config: Any, access: Access) -> int:
        """Return a block's shared memory; the source asserts that it counts the same."""

    @abstractmethod
    def needed_registers(self, problem: Any, config: Any) -> int:
        """Return the registers that a thread needs so that nothing spills."""

    @abstractmethod
    def constants(self, problem: Any, config: Any, access: Access) -> dict[str, bool | int]:
        """Return the constants of the source that `mma_tiles.cuh` has not."""

    @abstractmethod
    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors) -> bytes:
        """Make the struct that the function takes."""

    def refused(self, problem: Any, config: Any) -> str | None:
        """Return why a tile does not suit a problem."""
        return None

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        return (
            self.unfit(device)
            or self.outside(config)
            or misfit(config)
            or self.refused(problem, config)
            or spilling(config, self.needed_registers(problem, config))
            or self._too_large(problem, config, device)
        )

    def _too_large(self, problem: Any, config: Any, device: Device) -> str | None:
        """Return why blocks of so much shared memory do not fit an SM, or the output the grid."""
        shared = self.shared_bytes(problem, config, Access(qt=True))
        needed = shared + (config.blocks - 1) * (shared + RESERVED_BYTES)
        if needed > device.shared_bytes:
            return (
                f"{needed} bytes of shared memory for blocks={config.blocks}: {device.label} has "
                f"{device.shared_bytes}"
            )
        return "more than 2^30 tiles" if config.tiles(problem.m, problem.n) >= 2**30 else None

    def access(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        """Return a launch's access; without tensors that of contiguous ones at multiples of 16."""
        if inputs is None or outputs is None:
            layout = getattr(problem, "layout", "q")
            whole = problem.n * driver.ELEMENT_BYTES[problem.out] % 16 == 0
            copied = copy_bytes(self.row_bytes(problem))
            return Access(copied, layout != "qt" and whole, layout != "q" and problem.m % 16 == 0)
        return Access(
            copy_bytes(*places(inputs["a"]), *places(inputs["b"])),
            aligned(outputs.get("c", outputs.get("q"))),
            aligned(outputs.get("qt")),
        )

    def program(self, problem: Any, config: Any, access: Access) -> Program:
        """Return the function for tensors of some alignment."""
        shared = self.shared_bytes(problem, config, access)
        constants = {
            **self.constants(problem, config, access),
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
            "EXPECTED_SHARED_BYTES": shared,
        }
        return Program(self.source, header(constants), shared, config.warps, self.op)

    def programs(self, problem: Any, config: Any) -> list[Program]:
        return [self.program(problem, config, self.access(problem))]

    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        device, access = Device.of(inputs["a"]), self.access(problem, inputs, outputs)
        content = self.arguments(problem, inputs, outputs)
        blocks = config.tiles(problem.m, problem.n)
        self.run(problem, config, access, device, blocks, content)
