"""Kernels on tiles.cuh: configs and their legality, accesses to memory, arguments, loading."""

from __future__ import annotations

import dataclasses
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.device import SM_REGISTERS, Device
from jetfire.core.kernel import Config
from jetfire.core.problem import written_block
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import CudaKernel, Program

if TYPE_CHECKING:
    import torch

TILE = 128  # rows and columns
PARTS = 16  # of a tile, of 32×32 codes
BF16_COLUMNS = 64  # of a box of bf16, whose rows have at most 128 bytes
KEPT = 1024  # bytes of shared memory that the device keeps per block for itself


@dataclass(frozen=True)
class PartsConfig(Config):
    """Choices of who works on a tile.

    Attributes:
        warps: warps of a block; each has 16/warps of a tile's parts.
        stages: tiles in shared memory, of which one is being read.
        resident: blocks that an SM is to hold.
    """

    warps: int = 8
    stages: int = 2
    resident: int = 2


@dataclass(frozen=True)
class Access:
    """How numbers go to and from memory.

    Attributes:
        tma: codes that are read come in boxes, by the tensor memory accelerator.
        q, qt: bytes per access to codes that are written, and to their transpose.
        stream: bytes per access to bf16; 16 where there is none.
    """

    tma: bool
    q: int
    qt: int
    stream: int = 16


# --- legality ------------------------------------------------------------------------------------


def oversized(problem: Any) -> str | None:
    """Return which of a problem's sizes counts as too much."""
    sizes = (name for name in ("m", "n") if getattr(problem, name) > 2**30)
    return next((f"{x}={getattr(problem, x)}: expected at most 2^30" for x in sizes), None)


def room_reason(
    config: Config, warps: int, registers: int, shared: int, device: Device, prefix: str = ""
) -> str | None:
    """Return why an SM has no room for as many blocks as a config wants resident.

    Args:
        registers: of a thread.
        shared: of a block, in bytes.
        prefix: what the launch's fields of the config begin with.
    """
    resident, stages = (getattr(config, prefix + name) for name in ("resident", "stages"))
    if resident * 32 * warps * registers > SM_REGISTERS:
        return f"{prefix}resident={resident}: {registers} registers per thread do not fit"
    if resident * (shared + KEPT) > device.shared_bytes + KEPT:
        return f"{prefix}resident={resident} {prefix}stages={stages}: too much shared memory"
    return None


def fitting(warps: int, registers: int) -> int:
    """Return how many blocks the registers of an SM are enough for."""
    return SM_REGISTERS // (32 * warps * registers)


def count(m: int, n: int) -> int:
    """Count the tiles of an m×n matrix."""
    return ceil_div(m, TILE) * ceil_div(n, TILE)


# --- constants and arguments ---------------------------------------------------------------------


def writes_header(
    problem: Any,
    config: Any,
    shared: int,
    access: Access,
    own: Mapping[str, bool | int] | None = None,
    resident: int | None = None,
) -> str:
    """Write a header of the constants that tiles.cuh and tile_codes.cuh take.

    Args:
        shared: a block's shared memory in bytes.
        own: constants that the kernel has besides.
        resident: blocks per multiprocessor, where these are not the config's.
    """
    constants: dict[str, bool | int] = {
        "WARPS": config.warps,
        "STAGES": config.stages,
        "RESIDENT": config.resident if resident is None else resident,
        "SHARED_BYTES": shared,
        "BLOCK": problem.block,
        "OUT_BLOCK": written_block(problem),
    }
    written: dict[str, bool | int] = {
        "STOCHASTIC": problem.rounding == "stochastic",
        "WRITES_Q": problem.layout != "qt",
        "WRITES_QT": problem.layout != "q",
        "TMA": access.tma,
    }
    return header(
        {**constants, **(own or {}), **written, "Q_ACCESS": access.q, "QT_ACCESS": access.qt}
    )


def in_boxes(places: Sequence[int]) -> bool:
    """Return whether TMA takes matrices of these addresses and bytes from row to row."""
    return not any(place % 16 or place == 0 for place in places)


def places(inputs: Tensors, names: Sequence[str]) -> list[int]:
    """Return the addresses of the matrices that are there, and their bytes from row to row."""
    read = [inputs[name] for name in names if name in inputs]
    return [place for x in read for place in (x.data_ptr(), x.stride(0) * x.itemsize)]


def write_access(m: int, n: int, outputs: Tensors | None) -> tuple[int, int]:
    """Return the bytes per access to codes, m×n, and to their transpose."""
    # In place q is an input, whose alignment is any; and both may be given, as a part of a buffer.
    q, qt = (address((outputs or {}).get(name)) for name in ("q", "qt"))
    return 1 if n % 8 or q % 8 else 8, 1 if m % 4 or qt % 4 else 4


def codes_map(codes: torch.Tensor | None, access: Access, rows: int = TILE) -> bytes:
    """Return the tensor map of codes in boxes of some rows, zeros where there is none."""
    if codes is None or not access.tma:
        return driver.NO_MAP
    return driver.tensor_map(codes.data_ptr(), "int8", *codes.shape, codes.stride(0), rows, TILE)


def bf16_map(x: torch.Tensor | None, access: Access, rows: int = TILE) -> bytes:
    """Return the tensor map of bf16 in boxes of some rows, zeros where there is none."""
    if x is None or access.stream != 16:
        return driver.NO_MAP
    m, n = x.shape
    return driver.tensor_map(x.data_ptr(), "bf16", m, n, 2 * x.stride(0), rows, BF16_COLUMNS)


def matrix(inputs: Tensors, name: str) -> bytes:
    """Make the struct Matrix of codes and their scales, zeros where there are none."""
    if name not in inputs:
        return bytes(32)
    codes, scales = inputs[name], inputs[f"{name}_scale"]
    pitches = codes.stride(0), scales.stride(0)
    return struct.pack("<2Q2q", address(codes), address(scales), *pitches)


def aligned(content: bytes) -> bytes:
    """Fill up a struct that has tensor maps, which is aligned to 64 bytes."""
    return content + bytes(-len(content) % 64)


# --- kernels -------------------------------------------------------------------------------------


class TmaKernel(CudaKernel):
    """A kernel whose blocks go over tiles that TMA fetches, for sm_90 and later."""

    name = "tiles"
    candidate = True
    least = (9, 0)
    needs = "needs sm_90 or newer, for the tensor memory accelerator"


class TilesKernel(TmaKernel):
    """One launch of blocks of the grid that go over tiles."""

    Config: ClassVar[type[Any]] = PartsConfig

    @abstractmethod
    def registers(self, problem: Any, config: Any) -> int:
        """Return the registers that a thread needs so that nothing spills, as audited on sm_90."""

    @abstractmethod
    def shared_bytes(self, problem: Any, config: Any) -> int:
        """Return a block's shared memory; the source asserts that it counts the same."""

    @abstractmethod
    def program(self, problem: Any, config: Any, access: Access) -> Program:
        """Return the kernel function for tensors of some alignment."""

    @abstractmethod
    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        """Return the accesses of a launch; without tensors those of aligned, contiguous ones."""

    @abstractmethod
    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        """Make the struct that the kernel function takes."""

    def refused(self, problem: Any) -> str | None:
        """Return why a problem is none of this kernel's."""
        return None

    def blocks(self, problem: Any, config: Any, processors: int) -> int:
        """Return how many blocks go over the tiles: those that run at once."""
        return min(count(problem.m, problem.n), config.resident * processors)

    def legal(self, problem: Any, config: Any, device: Device) -> str | None:
        return (
            self.unfit(device)
            or self.refused(problem)
            or self.outside(config)
            or oversized(problem)
            or room_reason(
                config,
                config.warps,
                self.registers(problem, config),
                self.shared_bytes(problem, config),
                device,
            )
        )

    def default(self, problem: Any, device: Device) -> Any:
        """Return two tiles per block, and as many blocks as an SM has room for."""
        config = self.Config()
        by_registers = fitting(config.warps, self.registers(problem, config))
        shared = self.shared_bytes(problem, config) + KEPT
        by_memory = (device.shared_bytes + KEPT) // shared
        return dataclasses.replace(config, resident=min(by_registers, by_memory))

    def programs(self, problem: Any, config: Any) -> list[Program]:
        return [self.program(problem, config, self.accesses(problem))]

    def launch(self, problem: Any, config: Any, inputs: Tensors, outputs: Tensors) -> None:
        device = Device.of(next(iter(inputs.values())))
        access = self.accesses(problem, inputs, outputs)
        blocks = self.blocks(problem, config, driver.processors(device.index))
        content = self.arguments(problem, inputs, outputs, access)
        self.run(problem, config, access, device, blocks, content)
