"""Products by blocks in warp-group instructions, on block_gemm.cuh: configs, room and costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from jetfire.core.device import Device
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.hopper import TILE_K, TileConfig, readable
from jetfire.kernels_cuda.program import Program

if TYPE_CHECKING:
    import torch

# Numbers of block_epilogue.cuh's `enum Output`.
OUTPUTS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3}
# Registers of a thread that multiplies and of one that feeds it, by warp groups: at most what a
# launch gives to all warps together, in eights.
REGISTERS = {1: (184, 56), 2: (224, 56), 3: (152, 56), 4: (104, 56)}
# Beside the sums, what a thread that multiplies needs for each 64 rows, so that nothing spills.
OTHER_REGISTERS = 24
# Microseconds of a step of 128 of K on an H200, by groups and tile_n, for blocks of 32 and 128;
# measured on one wave of telescoped tiles, 8192 along K.
STEP_US = {
    (1, 64): (0.37, 0.20),
    (1, 128): (0.56, 0.30),
    (2, 64): (0.49, 0.31),
    (2, 96): (0.63, 0.38),
    (2, 128): (0.78, 0.48),
    (2, 192): (1.08, 0.67),
    (3, 64): (0.61, 0.39),
    (3, 96): (0.81, 0.55),
    (3, 128): (1.06, 0.64),
    (4, 64): (0.76, 0.52),
}
# For a tile's beginning and end. Requantising is not counted: it is work for each element, in any
# tile. Where int8 has the tiles of bf16 it was 0.96 of its speed at 8192³ (blocks of 32 and 64, in
# bursts); blocks of 128 (0.88) lose the rest by the tiles that `legal` leaves them.
TILE_US = 1.2
PAD = Program(Path(__file__).parent / "pad.cu", header({}), 0, 8, features="a")


@dataclass(frozen=True)
class BlockGemmConfig(TileConfig):
    """Choices of the kernels on block_gemm.cuh.

    Attributes:
        in_flight: groups that may multiply at once; 0 for all.
        schedule: of the promotion; ``exact`` rounds as the reference does (but for `stream`), and
            ``telescoped`` within `noise`. ``interleaved`` is telescoped in two sums that take
            blocks of 128 in turn: one is multiplied while the other is promoted.
    """

    groups: int = 3
    in_flight: Literal[0, 1, 2] = 0
    schedule: Literal["exact", "telescoped", "interleaved"] = "exact"

    @property
    def telescoped(self) -> bool:
        return self.schedule != "exact"

    @property
    def chains(self) -> int:
        """Sums that take blocks of K in turn."""
        return 2 if self.schedule == "interleaved" else 1


def factors(block: int, config: BlockGemmConfig) -> tuple[int, int]:
    """Return rows and columns of a tile's factors: as many as it has scales wherever it lies."""
    columns = next(c for c in (128, 64, 32) if c <= block and config.tile_n % c == 0)
    return config.tile_m // min(block, 64), config.tile_n // columns


def factor_floats(block: int, config: BlockGemmConfig) -> int:
    """Count the floats of a stage, as the source lays them out."""
    rows, columns = factors(block, config)
    pitch = ceil_div(columns, 4) * 4 if columns > 2 else columns
    return (128 // block + 2 * config.telescoped) * rows * pitch


def shared_bytes(block: int, config: BlockGemmConfig, staging: int = 8192) -> int:
    """Return a block's shared memory in bytes, with `staging` for each output buffer."""
    floats = factor_floats(block, config)
    return (
        config.stages * (config.tile_m + config.tile_n) * TILE_K
        + config.groups * config.buffers * staging
        + ceil_div(config.stages * floats, 4) * 16
        + 16 * config.telescoped
        + ceil_div(2 * config.telescoped * sum(factors(block, config)), 2) * 8
        + 16 * config.stages
    )


def accumulators(config: BlockGemmConfig) -> int:
    """Count the registers of a thread that hold sums, int32 and fp32."""
    products = config.rows * config.chains if config.telescoped else 1
    return (config.rows + products) * config.tile_n // 2


def room_reason(config: BlockGemmConfig, shared: int, device: Device) -> str | None:
    """Return why a block does not fit the device, or its groups cannot take turns."""
    limit = REGISTERS[config.groups][0] - OTHER_REGISTERS * (1 + (config.rows == 2))
    if accumulators(config) > limit:
        return (
            f"{accumulators(config)} sums per thread: {config.groups} groups have registers "
            f"for {limit}"
        )
    if shared > device.shared_bytes:
        return f"{shared} bytes of shared memory: {device.label} has {device.shared_bytes}"
    if config.chains > 1 and (config.rows > 1 or config.in_flight):
        return f"schedule={config.schedule}: expected rows=1 and in_flight=0"
    if config.groups <= config.in_flight:
        return f"in_flight={config.in_flight}: expected fewer than {config.groups} groups"
    return None


def tiles_reason(config: BlockGemmConfig, m: int, n: int) -> str | None:
    """Return why the kernel could not count the tiles of an m×n output."""
    if ceil_div(m, config.tile_m) * ceil_div(n, config.tile_n) >= 2**30:
        return "more than 2^30 tiles"
    return None


def boxes_reason(config: BlockGemmConfig) -> str | None:
    """Return which of a tile's sides is more than TMA fetches at once."""
    for name, size, share in (
        ("tile_m", config.tile_m, config.cluster_n),
        ("tile_n", config.tile_n, config.cluster_m),
    ):
        if size // share > 256:
            return f"{name}={size}: expected at most 256 rows per block of the cluster"
    return None


def read_by_tma(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy that TMA can read: aligned rows, apart, of a multiple of 16 bytes."""
    if readable(x):
        return x
    rows, columns = x.shape
    padded = x.new_empty((rows, ceil_div(columns, 16) * 16))
    addresses = np.uint64(padded.data_ptr()), np.uint64(x.data_ptr())
    sizes = np.int32(rows), np.int32(columns), np.int64(x.stride(0))
    PAD.launch(Device.of(x), rows, *addresses, *sizes)
    return padded
