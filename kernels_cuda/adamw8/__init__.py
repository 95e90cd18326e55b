"""AdamW with INT8 moments in CUDA C++: configuration, legality and launch of cluster.cu.

Triton's kernel cuts a tile of 128×128 into slices of 16 rows, and the last program of a tile reads
its new weights again, at 84% of what the L2 cache gives. Here nothing is read twice. 4096×16384 of
fp32 to codes both ways in blocks of 32, 64 and 128 took 425, 428 and 438 µs on an H100, 95, 95 and
93% of a copy's bandwidth, and Triton's kernel 453, 499 and 489. With weights in bf16, blocks of
128, it was 354 µs, 77%; Triton's 419.

Instructions issued per element of fp32 to codes both ways in blocks of 128, as compiled for sm_90:
95, of which 75 make the step.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
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

SOURCE = Path(__file__).parent / "cluster.cu"
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


def _even(problem: Any) -> bool:
    """Return whether all tiles are whole."""
    return bool(problem.m % problem.block == problem.n % TILE == 0)


def _map(x: torch.Tensor, access: Access) -> bytes:
    """Return the tensor map of a matrix in boxes of 32 rows of 128 bytes, or zeros."""
    if not access.tma:
        return driver.NO_MAP
    dtype, pitch = DTYPES[x.itemsize], x.stride(0) * x.itemsize
    return driver.tensor_map(x.data_ptr(), dtype, *x.shape, pitch, SIDE, 128 // x.itemsize)


class Adamw8Cluster(TilesKernel):
    """A tile of 128 columns, as high as a block of codes, for each cluster."""

    op = "adamw8"
    name = "cluster"
    needs = "needs sm_90 or newer, for clusters of blocks"
    Config = ClusterConfig
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (4, 8, 16),
        "rows": (4, 8),
        "resident": (1, 2, 3, 4, 5, 6),
    }

    def refused(self, problem: Any) -> str | None:
        if problem.eps and not SMALLEST <= problem.eps <= 1 / SMALLEST:
            return f"eps={problem.eps}: expected 0, or 2^-126 to 2^126"
        return None

    def registers(self, problem: Any, config: ClusterConfig) -> int:
        narrow = problem.dtype == "bf16"
        if config.rows == 8:
            return 96 if not narrow else 128 if _even(problem) else 160
        if narrow and not _even(problem):
            return 80
        return 48 if not narrow and _even(problem) and problem.layout != "q" else 64

    def shared_bytes(self, problem: Any, config: ClusterConfig) -> int:
        numbers = config.warps * config.rows * TILE
        return 2 * numbers * (ELEMENTS[problem.dtype] + 1) + 4 * TILE // config.rows + 16

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
        """Return slices of 32 rows, three per SM: 120 KiB of fp32 are then on their way to it.

        4096×16384 in blocks of 64 and 128 took 426 and 433 µs; with four 428 and 438, with five 430
        and 438, with two of 64 rows 428 and 432 (H100).
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
        tma = tiles.in_boxes(tiles.places(tensors, MATRICES) or [problem.n]) and q % 4 == 0
        columns = problem.m % 16 == qt % 16 == 0
        return Access(tma, q=4 if tma else 1, qt=16 if columns else 1, stream=16 if tma else 1)

    def program(self, problem: Any, config: ClusterConfig, access: Access) -> Program:
        shared, codes = self.shared_bytes(problem, config), problem.layout != "none"
        # Addresses of single bytes take more registers.
        roomy = fitting(config.warps, 80 if config.rows == 4 else 128)
        constants: dict[str, bool | int] = {
            "WARPS": config.warps,
            "ROWS": config.rows,
            "RESIDENT": config.resident if access.tma else min(config.resident, roomy),
            "SHARED_BYTES": shared,
            "BLOCK": problem.block,
            "CLUSTER": self.cluster(problem, config),
            "ELEMENT": ELEMENTS[problem.dtype],
            "GUARDED": problem.guarded,
            "TMA": access.tma,
            "EVEN": _even(problem),
            "QT_ACCESS": access.qt,
            "WRITES_Q": codes and problem.layout != "qt",
            "WRITES_QT": codes and problem.layout != "q",
        }
        return Program(SOURCE, header(constants), shared, config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        """Step in place: outputs hold the parameter and its moments before it and after it."""
        tensors = {**inputs, **outputs}
        maps = b"".join(_map(tensors[name], access) for name in MATRICES)
        places = (address(tensors.get(name)) for name in (*MATRICES, *OTHERS))
        rest = struct.pack("<15Qq", *places, tensors["grad"].stride(0))
        return tiles.aligned(maps + rest + _constants(problem))


KERNELS = (Adamw8Cluster(),)
