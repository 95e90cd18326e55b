"""Bit splitting of codes in CUDA C++, for sm_80 and later, with their column sums on the way.

A bias's gradient is the sum of just the codes that are split for the products: added up here they
are read once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import CudaKernel, Program
from jetfire.reference.bit_split import MOST
from jetfire.reference.bit_split_codes import MOST_CODE

if TYPE_CHECKING:
    from torch import Tensor

    from jetfire.ops.bit_split_codes import BitSplitCodesProblem

LARGEST = Path(__file__).parent / "largest.cu"
ROWS = Path(__file__).parent / "rows.cu"
CHUNK = 512  # columns of a warp
EACH = 16  # of a lane
LARGEST_WARPS = 8  # of the launch that finds the largest scale
MOST_SIZE = 1 << 30


@dataclass(frozen=True)
class RowsConfig(Config):
    """Choices of who splits what.

    Attributes:
        warps: warps of a block of the grid, of which `across` lie beside each other.
        rows: rows of a warp, whose column sums it leaves once.
    """

    warps: int = 8
    across: int = 2
    rows: int = 16

    @property
    def height(self) -> int:
        """Rows of a block of the grid."""
        return self.warps // self.across * self.rows


def _shared_bytes(problem: BitSplitCodesProblem, config: RowsConfig) -> int:
    return 8 * CHUNK * config.warps + 8 * config.height + 16


@lru_cache(maxsize=1024)
def _programs(
    problem: BitSplitCodesProblem, config: RowsConfig, vectors: bool
) -> tuple[Program, Program]:
    """Return the functions that find the unit and that split.

    Args:
        vectors: rows are accessed sixteen codes at a time.
    """
    shared = _shared_bytes(problem, config)
    most = np.float32(MOST[problem.bits] / MOST_CODE).view(np.int32)
    constants: dict[str, bool | int] = {
        "WARPS": config.warps,
        "ACROSS": config.across,
        "ROWS": config.rows,
        "BLOCK": problem.block,
        "BITS": problem.bits,
        "MOST_BITS": int(most),
        "SUMS": problem.sums,
        "VECTORS": vectors,
        "SHARED_BYTES": shared,
    }
    text = header(constants)
    return (
        Program(LARGEST, text, 0, LARGEST_WARPS),
        Program(ROWS, text, shared, config.warps),
    )


class RowsBitSplitCodes(CudaKernel):
    op = "bit_split_codes"
    name = "rows"
    candidate = True
    needs = "needs a GPU of sm_80 or later: it is compiled for that"
    Config = RowsConfig
    choices: ClassVar = {"warps": (2, 4, 8), "across": (1, 2, 4, 8), "rows": (4, 8, 16, 32)}

    def legal(
        self, problem: BitSplitCodesProblem, config: RowsConfig, device: Device
    ) -> str | None:
        if reason := self.unfit(device) or self.outside(config):
            return reason
        if config.across > config.warps:
            return f"across={config.across}: expected at most warps={config.warps}"
        for name, size in (("m", problem.m), ("n", problem.n)):
            if size > MOST_SIZE:
                return f"{name}={size}: expected at most 2^30"
        return None

    def default(self, problem: BitSplitCodesProblem, device: Device) -> RowsConfig:
        """Return warps beside each other so that none is idle, and 32 rows to a block.

        8192×3072, six chunks of columns, took an H100 44.0 µs with two across, and 50.7 with four.
        """
        across, chunks = 1, ceil_div(problem.n, CHUNK)
        while across < 8 and chunks % (2 * across) == 0:
            across *= 2
        return RowsConfig(8, across, 4 * across)

    def programs(self, problem: BitSplitCodesProblem, config: RowsConfig) -> tuple[Program, ...]:
        return _programs(problem, config, problem.n % EACH == 0)

    def launch(
        self, problem: BitSplitCodesProblem, config: RowsConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        q = inputs["q"]
        device = Device.of(q)
        vectors = (problem.n | q.stride(0) | q.data_ptr()) % EACH == 0
        largest, rows = _programs(problem, config, vectors)
        totals = inputs["scale"].new_empty(2 * (problem.n + 1)) if problem.sums else None
        content = _arguments(problem, inputs, outputs, totals)
        blocks = min(ceil_div(problem.m, problem.block), driver.processors(device.index))
        largest.launch(device, blocks, content)
        rows.launch(device, ceil_div(problem.m, config.height), content)


def _arguments(
    problem: BitSplitCodesProblem, inputs: Tensors, outputs: Tensors, totals: Tensor | None
) -> bytes:
    """Make the struct that both functions take.

    Args:
        totals: room for n + 1 integers of eight bytes.
    """
    q, scale = inputs["q"], inputs["scale"]
    places = (
        *(q, scale, inputs.get("seed"), outputs["unit"], outputs["parts"], outputs["squares"]),
        *(outputs.get("sums"), totals, counters(q.device, 2)),
    )
    sizes = q.stride(0), scale.stride(0), problem.m, problem.n
    return struct.pack("<9Q2q2i", *map(address, places), *sizes)


KERNELS = (RowsBitSplitCodes(),)
