"""The launch of kernels on hadamard_rows.cuh for export: what their host code has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from jetfire.core.host import Host
from jetfire.kernels_cuda.hadamard_rows import MOST_COLUMNS, RowsConfig

NOTES: Mapping[str, str] = {
    "GROUP": "columns that are transformed together",
    "FACTOR_BITS": "of the float 1/√GROUP",
    "ELEMENTS": "neighbours that a thread has",
    "CHUNKS": "runs of them that a thread has of a tile",
    "LANES": "threads that walk a row",
    "WARPS": "of a block",
    "BLOCKS": "blocks that an SM is to hold, registers for them",
    "PREFETCH": "a tile is read before its predecessor is transformed",
    "WIDE": "codes are written one in a byte",
    "WIDE_BYTES": "of these, that one access writes",
}
WIDE = "wide holds one code per byte, in its high half; the low one is 0."


def packed(name: str) -> str:
    """Return what is said of packed codes."""
    return f"{name} holds two codes per byte, the first in its low half."


class RowsHost(Host):
    """Host code for sm_80 and later: a few threads per row."""

    threads = "32 * WARPS"

    @abstractmethod
    def argument_bytes(self, problem: Any) -> int:
        """Return the size of the struct that the kernel function takes."""

    def multiples(self, problem: Any, config: RowsConfig) -> dict[str, int]:
        """Return the least n that the code is made for; n may be any multiple of it."""
        matrices = self.kernel.matrices(problem, config)
        accesses = (8 * matrix.access // matrix.bits for _, matrix in matrices)
        return {"n": max(2, problem.group, *accesses)}

    def reason(self, problem: Any, config: RowsConfig, dim: str) -> str:
        whole = "whole groups" if problem.group > 1 else "two codes per byte"
        most = max(matrix.access for _, matrix in self.kernel.matrices(problem, config))
        return f"{whole}, of rows that are accessed in up to {most} bytes"

    def most(self, problem: Any) -> dict[str, int]:
        return {"n": MOST_COLUMNS}

    def values(self, problem: Any, config: RowsConfig) -> dict[str, Any]:
        return {
            "argument_bytes": self.argument_bytes(problem),
            "function": self.codes(problem, config)[0].name,
            "most_columns": MOST_COLUMNS,
            "constants": {"ROWS": (config.rows, "rows of a block")},
        }
