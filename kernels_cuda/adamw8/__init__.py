"""AdamW with INT8 moments in CUDA C++: configuration, legality and launch of cluster.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import REGISTERS, TILE, Access, TilesKernel, oversized

SOURCE = Path(__file__).parent / "cluster.cu"
LEAST = 32  # rows of a slice, so that a column's codes are whole sectors
ELEMENTS = {"fp32": 4, "bf16": 2}
SMALLEST = 2.0**-126  # of fp32's normal numbers


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
    resident: int = 4


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


class Adamw8Cluster(TilesKernel):
    """A tile of 128 columns, as high as a block of codes, for each cluster of blocks."""

    op = "adamw8"
    name = "cluster"
    needs = "needs sm_90 or newer, for clusters of blocks"
    Config = ClusterConfig
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (4, 8, 16, 32),
        "rows": (4, 8),
        "resident": (1, 2, 3, 4, 5),
    }

    def refused(self, problem: Any) -> str | None:
        if problem.eps and not SMALLEST <= problem.eps <= 1 / SMALLEST:
            return f"eps={problem.eps}: expected 0, or 2^-126 to 2^126"
        return None

    def registers(self, problem: Any, config: ClusterConfig) -> int:
        return 64 if config.rows == 4 else 128

    def shared_bytes(self, problem: Any, config: ClusterConfig) -> int:
        slice_rows, element = config.warps * config.rows, ELEMENTS[problem.dtype]
        return slice_rows * TILE * 2 * (element + 1) + 4 * TILE // config.rows + 16

    def legal(self, problem: Any, config: ClusterConfig, device: Device) -> str | None:
        reason = (
            self.unfit(device)
            or self.outside(config)
            or self.refused(problem)
            or oversized(problem)
        )
        if reason:
            return reason
        slice_rows, registers = config.warps * config.rows, self.registers(problem, config)
        if not LEAST <= slice_rows <= problem.block:
            return (
                f"warps={config.warps} rows={config.rows}: expected {LEAST} to {problem.block} rows"
            )
        if config.resident * 32 * config.warps * registers > REGISTERS:
            return f"resident={config.resident}: {registers} registers per thread do not fit"
        return None

    def default(self, problem: Any, device: Device) -> ClusterConfig:
        return ClusterConfig()

    def blocks(self, problem: Any, config: ClusterConfig, processors: int) -> int:
        """Return the slices of all tiles, those beyond the last row included."""
        tiles = ceil_div(problem.m, problem.block) * ceil_div(problem.n, TILE)
        return tiles * (problem.block // (config.warps * config.rows))

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        element = ELEMENTS[problem.dtype]
        read, written = inputs or {}, outputs or {}
        places = [problem.n]  # in units of the vectors of four
        if "grad" in read:
            grad = read["grad"]
            places += [grad.stride(0), address(grad) // element]
        if "param" in read:
            places += [address(read["param"]) // element]
        codes = read.get("exp_avg"), read.get("exp_avg_sq"), written.get("q")
        places += [address(x) for x in codes]
        vectors = not any(place % 4 for place in places)
        column = problem.m, address(written.get("qt"))
        qt = 1 if any(place % 16 for place in column) else 16
        return Access(False, q=4 if vectors else 1, qt=qt, stream=(4 if vectors else 1) * element)

    def program(self, problem: Any, config: ClusterConfig, access: Access) -> Program:
        codes = problem.layout != "none"
        constants: dict[str, bool | int] = {
            "WARPS": config.warps,
            "ROWS": config.rows,
            "RESIDENT": config.resident,
            "BLOCK": problem.block,
            "CLUSTER": problem.block // (config.warps * config.rows),
            "ELEMENT": ELEMENTS[problem.dtype],
            "GUARDED": problem.guarded,
            "TMA": access.tma,
            "SHARED_BYTES": self.shared_bytes(problem, config),
            "EVEN": problem.m % problem.block == problem.n % TILE == 0,
            "QT_ACCESS": access.qt,
            "WRITES_Q": codes and problem.layout != "qt",
            "WRITES_QT": codes and problem.layout != "q",
        }
        return Program(SOURCE, header(constants), constants["SHARED_BYTES"], config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        state = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        scalars = ("rate", "step", "grad_scale", "found_inf", "seed")
        places = (
            *(address(inputs.get(name)) for name in ("param", "grad", *state)),
            *(address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t")),
            *(address(inputs.get(name)) for name in scalars),
        )
        return struct.pack("<15Qq", *places, inputs["grad"].stride(0)) + _constants(problem)


KERNELS = (Adamw8Cluster(),)
