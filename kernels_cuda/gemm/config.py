"""The config of the sm_90a kernel: how it cuts and feeds its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda.hopper import TILE_K

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

# With `stream`, where tiles are fewer than multiprocessors, at most this many blocks for each: one
# reads what the others of a tile leave. It waits for the first parts of blocks after it: all must
# get to run, which they do, being no more than the multiprocessors, once whatever else is running
# ends.
PARTS_A_TILE = 4


@dataclass(frozen=True)
class WgmmaConfig(Config):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        groups: warp groups that multiply, one below the other.
        rows: 64s of rows of each group, in a tile of 64·rows·groups rows.
        tile_n: columns of a tile.
        stages: buffers of 128 of K in shared memory.
        buffers: output buffers per group, of 8 KiB or more.
        cluster_m, cluster_n: blocks that fetch B, or A, together.
        raster: rows of (cluster) tiles that are walked column by column.
        in_flight: groups that may multiply at once; 0 for all.
        stream: stream-K: deal K of the last tiles out evenly to all blocks; of those that share a
            tile one adds up what the others leave in memory.
        schedule: of the promotion; ``exact`` rounds as the reference does (but for `stream`), and
            ``telescoped``, which `default` takes, within `noise`.
    """

    groups: int = 3
    rows: int = 1
    tile_n: int = 128
    stages: int = 4
    buffers: int = 1
    cluster_m: int = 1
    cluster_n: int = 1
    raster: int = 8
    in_flight: Literal[0, 1, 2] = 0
    stream: bool = False
    schedule: Literal["exact", "telescoped"] = "exact"

    @property
    def tile_m(self) -> int:
        return 64 * self.rows * self.groups

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def telescoped(self) -> bool:
        return self.schedule == "telescoped"


def cluster_tiles(problem: GemmProblem, config: WgmmaConfig) -> int:
    return ceil_div(problem.m, config.tile_m * config.cluster_m) * ceil_div(
        problem.n, config.tile_n * config.cluster_n
    )


def clusters(problem: GemmProblem, config: WgmmaConfig, processors: int) -> int:
    """Return how many clusters a launch has: all that run at once, or as many as have work."""
    parts = min(PARTS_A_TILE, ceil_div(problem.k, TILE_K)) if config.stream else 1
    return min(cluster_tiles(problem, config) * parts, processors // config.cluster)


def whole_tiles(tiles: int, workers: int) -> int:
    """Return how many tiles `stream` does not deal out: whole waves, but for the last one."""
    waves, others = divmod(tiles, workers)
    return workers * (max(waves - 1, 0) if others else waves)
