"""GELU's CUDA kernel for export: its constants, and what callers must keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jetfire.core.host import Host
from jetfire.kernels_cuda import gelu
from jetfire.kernels_cuda.tiles import TILE, PartsConfig

if TYPE_CHECKING:
    from jetfire.ops.gelu import GeluProblem

NOTES = {
    "WARPS": "of a block, which share a tile's sixteen parts",
    "STAGES": "tiles in shared memory, of which one is being read",
    "RESIDENT": "blocks that an SM is to hold, registers for them",
    "SHARED_BYTES": "of a block",
    "BLOCK": "rows and columns that share a scale",
    "OUT_BLOCK": "the same of the codes that are written",
    "BACKWARD": "the gradient of GELU, times dy",
    "ERF": "GELU by the error function, else its form by tanh",
    "STOCHASTIC": "codes are rounded up or down at random",
    "WRITES_Q": "codes are written row by row",
    "WRITES_QT": "codes are written transposed",
    "TMA": "codes are read in boxes, by TMA",
    "Q_ACCESS": "bytes of a row of codes that one access writes",
    "QT_ACCESS": "and of a row of the transposed ones",
}


class TilesHost(Host):
    """Host code for sm_90 and later: blocks that go over tiles of 128×128 codes."""

    kernel = gelu.GeluTiles()
    template = "gelu/tiles.j2"
    notes: ClassVar[Mapping[str, str]] = NOTES
    reasons: ClassVar[Mapping[str, str]] = {
        "m": "rows are taken {} at a time",
        "n": "rows are accessed in {} bytes",
    }
    aligned = ("x", "dy", "q", "qt")
    tensor_maps = True

    def multiples(self, problem: GeluProblem, config: PartsConfig) -> dict[str, int]:
        access = self.kernel.accesses(problem)
        wanted = {"m": access.qt, "n": 16 if access.tma else access.q}
        return {dim: multiple for dim, multiple in wanted.items() if multiple > 1}

    def values(self, problem: GeluProblem, config: PartsConfig) -> dict[str, Any]:
        return {
            "tma": self.kernel.accesses(problem).tma,
            "inputs": ("x", "dy") if problem.mode == "bwd" else ("x",),
            "constants": {
                "TILE": (TILE, "rows and columns of a tile"),
                "BLOCK": (problem.block, "and of a block that has a scale"),
                "RESIDENT": (config.resident, "blocks per multiprocessor"),
            },
        }


HOSTS: Mapping[str, Host] = {"tiles": TilesHost()}
