"""Kernels on hadamard_rows.cuh: configs, their legality, and what decides a matrix's code."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jetfire.core.device import SM_REGISTERS, Device
from jetfire.core.kernel import Config
from jetfire.kernels_cuda.program import CudaKernel, Program

MOST_COLUMNS = 1 << 24  # a row's sum of squares is below 2^31, and so is every index in it
MOST_ELEMENTS = 32  # a thread: those of 64 have more than 255 registers to hold


@dataclass(frozen=True)
class RowsConfig(Config):
    """Choices of how rows are walked: in tiles of lanes·elements·chunks columns.

    Attributes:
        elements: neighbours that a thread has.
        chunks: runs of them that a thread has of a tile.
        lanes: threads that walk a row.
        warps: warps of a block.
        blocks: blocks that an SM is to hold: each has as many registers as that leaves.
        prefetch: a tile is read before the one before it is transformed.
    """

    elements: int = 8
    chunks: int = 4
    lanes: int = 32
    warps: int = 4
    blocks: int = 4
    prefetch: bool = True

    @property
    def tile(self) -> int:
        return self.lanes * self.elements * self.chunks

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 32 * self.warps // self.lanes


@dataclass(frozen=True)
class Matrix:
    """The part of a tensor that decides the code: its elements, and the bytes per access.

    Attributes:
        kind: a float's short name, or ``nibbles`` or ``bytes``.
    """

    kind: str
    access: int

    @property
    def bits(self) -> int:
        return bits_of(self.kind)


def bits_of(kind: str) -> int:
    return {"nibbles": 4, "bytes": 8, "fp32": 32}.get(kind, 16)


def access_of(n: int, kind: str, elements: int, *places: int) -> int:
    """Return the most bytes of a run that divide a row, and all of `places`: addresses, pitches."""
    row = n * bits_of(kind) // 8
    most = min(16, elements * bits_of(kind) // 8)
    return next(
        size
        for size in (16, 8, 4, 2, 1)
        if size <= most and not any(place % size for place in (row, *places))
    )


Matrices = tuple[tuple[str, Matrix], ...]


def registers(config: RowsConfig) -> int:
    """Return a thread's share of an SM's registers for as many blocks as are wanted."""
    return min(255, SM_REGISTERS // (32 * config.warps * config.blocks) // 8 * 8)


def idle(problem: Any, config: RowsConfig) -> int:
    """Count the columns of the last tile that lie past the row's end."""
    return int(-problem.n % config.tile)


def constants(problem: Any, config: RowsConfig, aligned: bool) -> dict[str, bool | int]:
    """Return the constants of hadamard_rows.cuh.

    Args:
        aligned: False where bytes lie anywhere: they take registers to put in place.
    """
    return {
        "GROUP": problem.group,
        "FACTOR_BITS": int(np.float32(problem.group**-0.5).view(np.int32)),
        "ELEMENTS": config.elements,
        "CHUNKS": config.chunks,
        "LANES": config.lanes,
        "WARPS": config.warps,
        "BLOCKS": config.blocks if aligned else 1,
        "PREFETCH": config.prefetch,
    }


class RowsKernel(CudaKernel):
    """A kernel whose threads walk rows in tiles."""

    name = "rows"
    Config = RowsConfig
    needs = "needs a GPU of sm_80 or later: it is compiled for that"
    choices: ClassVar = {
        "elements": (8, 16, 32),
        "chunks": (1, 2, 4),
        "lanes": (4, 8, 16, 32),
        "warps": (1, 2, 4, 8, 16),
        "blocks": (1, 2, 3, 4, 6, 8, 12, 16),
        "prefetch": (False, True),
    }

    @abstractmethod
    def matrices(self, problem: Any, config: RowsConfig) -> Matrices:
        """Return the matrices of contiguous tensors of the problem's dtype, at multiples of 16."""

    @abstractmethod
    def program(self, problem: Any, config: RowsConfig, access: Matrices) -> Program:
        """Return the function for matrices of some alignment; all shapes may have the same."""

    def programs(self, problem: Any, config: RowsConfig) -> list[Program]:
        return [self.program(problem, config, self.matrices(problem, config))]

    @abstractmethod
    def needed_registers(self, problem: Any, config: RowsConfig) -> int:
        """Return what a thread needs so that nothing spills, as audited on sm_80 to sm_90."""

    def refused(self, problem: Any, config: RowsConfig) -> str | None:
        """Return why a problem is not for a config, beside what all kernels refuse."""
        return None

    def legal(self, problem: Any, config: RowsConfig, device: Device) -> str | None:
        if reason := self.unfit(device) or self.outside(config):
            return reason
        if problem.n > MOST_COLUMNS:
            return f"n={problem.n}: expected at most {MOST_COLUMNS}"
        if (held := config.elements * config.chunks) > MOST_ELEMENTS:
            return f"{held} elements per thread: expected at most {MOST_ELEMENTS}"
        if config.tile < problem.group:
            return f"tiles of {config.tile} columns: expected at least group={problem.group}"
        if reason := self.refused(problem, config):
            return reason
        needed = self.needed_registers(problem, config)
        if needed > (limit := registers(config)):
            return (
                f"needs {needed} registers per thread: blocks={config.blocks} of {config.warps} "
                f"warps leave {limit}"
            )
        return None
