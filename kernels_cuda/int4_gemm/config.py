"""The config of the sm_90a kernel: how it cuts and feeds its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.kernels_cuda.hopper import TileConfig

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem


@dataclass(frozen=True)
class WgmmaConfig(TileConfig):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        split: parts of K with blocks of their own, whose raw sums a second kernel adds.
    """

    tile_n: int = 256
    cluster_m: int = 2
    split: int = 1


SPACE: dict[str, Sequence[Any]] = {
    "groups": (1, 2, 3, 4),
    "rows": (1, 2),
    "tile_n": (64, 96, 128, 192, 256),
    "stages": (3, 4, 5, 6, 7, 8),
    "buffers": (1, 2),
    "cluster_m": (1, 2, 4),
    "cluster_n": (1, 2),
    "raster": (1, 2, 4, 8, 16, 32),
    "split": (1, 2, 3, 4, 6, 8, 12, 16),
}


def cluster_tiles(problem: Int4GemmProblem, config: WgmmaConfig) -> int:
    """Count (cluster) tiles, each as often as its K is split."""
    return config.cluster_tiles(problem.m, problem.n) * config.split
