"""The config of the sm_90a kernel: how it cuts and feeds its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem


@dataclass(frozen=True)
class WgmmaConfig(Config):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        groups: warp groups that multiply, one below the other.
        rows: 64s of rows of each group, in a tile of 64·rows·groups rows.
        tile_n: columns of a tile.
        stages: buffers of 128 of K in shared memory.
        buffers: output buffers per group, of 8 KiB.
        cluster_m, cluster_n: blocks that fetch B, or A, together.
        raster: rows of (cluster) tiles that are walked column by column.
        split: parts of K with blocks of their own, whose raw sums a second kernel adds.
    """

    groups: int = 2
    rows: int = 1
    tile_n: int = 256
    stages: int = 4
    buffers: int = 1
    cluster_m: int = 2
    cluster_n: int = 1
    raster: int = 8
    split: int = 1

    @property
    def tile_m(self) -> int:
        return 64 * self.rows * self.groups

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n


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
    down = ceil_div(problem.m, config.tile_m * config.cluster_m)
    return down * ceil_div(problem.n, config.tile_n * config.cluster_n) * config.split
