"""A step of AdamW by clusters of blocks: configuration, legality and launch of adamw_cluster.cuh.

An op's own kernel says how its moments are kept, and how many registers a thread needs.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver, tiles
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import KEPT, TILE, Access, TilesKernel, fitting

if TYPE_CHECKING:
    import torch

SIDE = 32  # rows of a box, and the least of a slice, so that a column's codes are whole sectors
ELEMENTS = {"fp32": 4, "bf16": 2}
DTYPES: dict[int, Literal["int8", "bf16", "fp32"]] = {1: "int8", 2: "bf16", 4: "fp32"}
SMALLEST = 2.0**-126  # of fp32's normal numbers
MATRICES = ("param", "grad", "exp_avg", "exp_avg_sq")
OTHERS = (
    *("exp_avg_scale", "exp_avg_sq_scale", "q", "scale", "qt", "scale_t"),
    *("rate", "step", "grad_scale", "found_inf", "seed"),
)


@dataclass(frozen=True)
class ClusterConfig(Config):
    """Choices of who works on a tile.

    Attributes:
        warps: warps of a block of the grid.
        rows: rows of a warp, four columns per lane.
        resident: blocks that an SM is to hold.
    """

    warps: int = 8
    rows: int = 4
    resident: int = 3


@lru_cache(maxsize=256)
def _constants(problem: Any) -> bytes:
    """Return the betas as the nearest fp32, their shares and logarithms, and what is beside them.

    The shares 1 − beta are exact where beta is at least a half.
    """
    betas = [np.float32(beta) for beta in (problem.beta1, problem.beta2)]
    shares = [np.float32(1) - beta for beta in betas]
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    rest = problem.eps, problem.decay, problem.m, problem.n
    return struct.pack("<8f2i", *betas, *shares, *logs, *rest)


def even(problem: Any) -> bool:
    """Return whether all tiles are whole."""
    return bool(problem.m % problem.block == problem.n % TILE == 0)


def element(problem: Any) -> int:
    """Return the bytes of a weight: fp32's in an op that has no other dtype."""
    return ELEMENTS[getattr(problem, "dtype", "fp32")]


def _map(x: torch.Tensor, access: Access) -> bytes:
    """Return the tensor map of a matrix in boxes of 32 rows of 128 bytes, or zeros."""
    if not access.tma:
        return driver.NO_MAP
    dtype, pitch = DTYPES[x.itemsize], x.stride(0) * x.itemsize
    return driver.tensor_map(x.data_ptr(), dtype, *x.shape, pitch, SIDE, 128 // x.itemsize)


class StepCluster(TilesKernel):
    """A tile of 128 columns, as high as a block of codes, for each cluster.

    Attributes:
        source: the kernel function's.
        moment: bytes of a number of either moment.
    """

    name = "cluster"
    needs = "needs sm_90 or newer, for clusters of blocks"
    Config = ClusterConfig
    source: ClassVar[Path]
    moment: ClassVar[int]

    def refused(self, problem: Any) -> str | None:
        if problem.eps and not SMALLEST <= problem.eps <= 1 / SMALLEST:
            return f"eps={problem.eps}: expected 0, or 2^-126 to 2^126"
        return None

    def shared_bytes(self, problem: Any, config: ClusterConfig) -> int:
        numbers = config.warps * config.rows * TILE
        return 2 * numbers * (element(problem) + self.moment) + 4 * TILE // config.rows + 16

    def legal(self, problem: Any, config: ClusterConfig, device: Device) -> str | None:
        return self.unfit(device) or self.outside(config) or self._misfit(problem, config, device)

    def _misfit(self, problem: Any, config: ClusterConfig, device: Device) -> str | None:
        """Return why a problem is none of this kernel's, or not in these slices."""
        warps, rows, block = config.warps, config.rows, problem.block
        registers, shared = self.registers(problem, config), self.shared_bytes(problem, config)
        if reason := self.refused(problem) or tiles.oversized(problem):
            return reason
        if not SIDE <= warps * rows <= block:
            return f"warps={warps} rows={rows}: expected {SIDE} to {block} rows of a block"
        if config.resident > fitting(warps, registers):
            return f"resident={config.resident}: {registers} registers per thread do not fit"
        if config.resident * (shared + KEPT) > device.shared_bytes + KEPT:
            return f"resident={config.resident}: too much shared memory"
        return None

    def default(self, problem: Any, device: Device) -> ClusterConfig:
        """Return slices of 32 rows, three per SM.

        Of fp32 beside INT8 moments 120 KiB are then on their way to it, and with fp32's 192.
        4096×16384 in blocks of 64 and 128 took 426 and 433 µs beside INT8 moments; with four per SM
        428 and 438, with five 430 and 438, with two of 64 rows 428 and 432 (H100).
        """
        config = ClusterConfig()
        shared = self.shared_bytes(problem, config) + KEPT
        by_memory = (device.shared_bytes + KEPT) // shared
        by_registers = fitting(config.warps, self.registers(problem, config))
        return dataclasses.replace(config, resident=min(config.resident, by_registers, by_memory))

    def blocks(self, problem: Any, config: ClusterConfig, processors: int) -> int:
        """Return how many slices there are, those beyond the last row included."""
        count = ceil_div(problem.m, problem.block) * ceil_div(problem.n, TILE)
        return count * self.cluster(problem, config)

    def cluster(self, problem: Any, config: ClusterConfig) -> int:
        """Return how many blocks of the grid a tile has."""
        return int(problem.block) // (config.warps * config.rows)

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        tensors = {**(inputs or {}), **(outputs or {})}
        q, qt = (address(tensors.get(name)) for name in ("q", "qt"))
        places = tiles.places(tensors, MATRICES) or [problem.n * self.moment]
        tma = tiles.in_boxes(places) and q % 4 == 0
        columns = problem.m % 16 == qt % 16 == 0
        return Access(tma, q=4 if tma else 1, qt=16 if columns else 1, stream=16 if tma else 1)

    def program(self, problem: Any, config: ClusterConfig, access: Access) -> Program:
        shared, codes = self.shared_bytes(problem, config), problem.quantises
        # Addresses of single numbers take more registers.
        registers = 128 if config.rows == 8 else 96 if element(problem) == 2 else 80
        roomy = fitting(config.warps, registers)
        constants: dict[str, bool | int] = {
            "WARPS": config.warps,
            "ROWS": config.rows,
            "RESIDENT": config.resident if access.tma else min(config.resident, roomy),
            "SHARED_BYTES": shared,
            "BLOCK": problem.block,
            "CLUSTER": self.cluster(problem, config),
            "ELEMENT": element(problem),
            "MOMENT": self.moment,
            "GUARDED": problem.guarded,
            "TMA": access.tma,
            "EVEN": even(problem),
            "QT_ACCESS": access.qt,
            "WRITES_Q": codes and problem.layout != "qt",
            "WRITES_QT": codes and problem.layout != "q",
        }
        return Program(self.source, header(constants), shared, config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        """Step in place: outputs hold the parameter and its moments before it and after it."""
        tensors = {**inputs, **outputs}
        maps = b"".join(_map(tensors[name], access) for name in MATRICES)
        places = (address(tensors.get(name)) for name in (*MATRICES, *OTHERS))
        rest = struct.pack("<15Qq", *places, tensors["grad"].stride(0))
        return tiles.aligned(maps + rest + _constants(problem))
