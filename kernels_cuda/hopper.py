"""GEMMs in sm_90a's warp-group instructions: their tiles, tensor maps, and the product itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.program import CudaKernel

if TYPE_CHECKING:
    import torch

TILE_K = 128


def wgmma_wrapper(tile_n: int) -> str:
    """Write the s8 wgmma of 64×tile_n×32: its operand list is as long as tile_n/2."""
    count = tile_n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void wgmma(int (&d)[{count}], unsigned long long a,
                                      unsigned long long b, int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{tile_n}k32.s32.s8.s8 "
      "{{{registers}}}, %{count}, %{count + 1}, p;\\n}}"
      : {operands} : "l"(a), "l"(b), "r"(accumulate));
}}"""


@dataclass(frozen=True)
class TileConfig(Config):
    """Choices of how a block's tile is cut and fed, each kernel's with its own defaults.

    Attributes:
        groups: warp groups that multiply, one below the other.
        rows: 64s of rows of each group, in a tile of 64·rows·groups rows.
        tile_n: columns of a tile.
        stages: buffers of 128 of K in shared memory.
        buffers: output buffers per group, of 8 KiB or more.
        cluster_m, cluster_n: blocks that fetch B, or A, together.
        raster: rows of (cluster) tiles that are walked column by column.
    """

    groups: int = 2
    rows: int = 1
    tile_n: int = 128
    stages: int = 4
    buffers: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    raster: int = 8

    @property
    def tile_m(self) -> int:
        return 64 * self.rows * self.groups

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def warps(self) -> int:
        """Warps of a block: those of a group more feed the ones that multiply."""
        return 4 * (self.groups + 1)

    def cluster_tiles(self, m: int, n: int) -> int:
        """Count the (cluster) tiles of an m×n output."""
        down = ceil_div(m, self.tile_m * self.cluster_m)
        return down * ceil_div(n, self.tile_n * self.cluster_n)


def tile_constants(config: TileConfig) -> dict[str, bool | int]:
    """Return the constants of hopper.cuh."""
    names = [field.name for field in fields(TileConfig)]
    return {name.upper(): getattr(config, name) for name in names}


def panel_bytes(config: TileConfig, element: int) -> int:
    """Return the bytes of a row that TMA writes at a time: what divides a tile's."""
    return next(width for width in (128, 64, 32) if config.tile_n * element % width == 0)


def operand_map(
    address: int, rows: int, columns: int, pitch: int, tile: int, cluster: int
) -> bytes:
    """Make the tensor map of A or B, of which each block of a cluster fetches a part of a tile."""
    return driver.tensor_map(address, "int8", rows, columns, pitch, tile // cluster, TILE_K)


def output_map(config: TileConfig, address: int, dtype: Any, rows: int, columns: int) -> bytes:
    """Make the tensor map of a contiguous output."""
    element = driver.ELEMENT_BYTES[dtype]
    box = panel_bytes(config, element) // element
    return driver.tensor_map(address, dtype, rows, columns, columns * element, 64, box)


def readable(x: torch.Tensor) -> bool:
    """Return whether TMA can read x: aligned rows, apart, of a multiple of 16 bytes."""
    return not (x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(0) < x.shape[1])


class WgmmaKernel(CudaKernel):
    """A GEMM in warp-group instructions, whose blocks go over tiles."""

    name = "wgmma"
    least = (9, 0)
    needs = "needs sm_90: it is written in its warp-group instructions"

    def unfit(self, device: Device) -> str | None:
        """Return why it cannot run on a device, or be compiled; newer ones lack sm_90a's."""
        newer = device.kind == "cuda" and (device.capability or (0, 0)) > self.least
        return self.needs if newer else super().unfit(device)


def fastest(
    kernel: WgmmaKernel,
    problem: Any,
    device: Device,
    candidates: Iterable[Any],
    price: Callable[[Any], float],
) -> Any:
    """Return the legal candidate that should be fastest; the kernel's own default where none is."""
    legal = [c for c in candidates if kernel.legal(problem, c, device) is None]
    return min(legal, key=price) if legal else kernel.Config()
