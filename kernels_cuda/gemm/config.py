"""The sm_90a kernel's config, and what a launch of it has: clusters, whole tiles, rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda.block_gemm import BlockGemmConfig
from jetfire.kernels_cuda.hopper import TILE_K

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

# With `stream`, where tiles are fewer than multiprocessors, at most this many blocks for each: one
# reads what the others of a tile leave. It waits for the first parts of blocks after it: all must
# get to run, which they do, being no more than the multiprocessors, once whatever else is running
# ends.
PARTS_A_TILE = 4


@dataclass(frozen=True)
class WgmmaConfig(BlockGemmConfig):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        stream: stream-K: deal K of the last tiles out evenly to all blocks; of those that share a
            tile one adds up what the others leave in memory.
    """

    stream: bool = False

    @property
    def banded(self) -> bool:
        """Whether a launch is two, of which each has a band of rows.

        Clusters of more than two do not fill a device: an H200's 132 multiprocessors hold 30
        clusters of four or 15 of eight, 120 blocks. The second launch is of clusters of two, on the
        multiprocessors that are left over.
        """
        return self.cluster > 2

    @property
    def below(self) -> WgmmaConfig:
        """The config of the second launch."""
        return replace(self, cluster_m=1, cluster_n=2)


@dataclass(frozen=True)
class Bands:
    """How rows are dealt out to large clusters and to those of two beside them.

    Attributes:
        border: rows of the large ones, from the first on.
        turns: tiles that a cluster computes at most, one after the other.
        tiles: the same if a tile could be divided among clusters.
    """

    border: int
    turns: float
    tiles: float


def bands(problem: GemmProblem, config: WgmmaConfig, large: int, others: int) -> Bands:
    """Deal rows out to `large` clusters of a config and `others` of two: to end soonest."""
    rows = config.tile_m * config.cluster_m
    count = ceil_div(problem.m, rows)
    even = count * large * config.cluster // (large * config.cluster + 2 * others)

    def dealt(whole: int) -> Bands:
        border = min(whole * rows, problem.m)
        above = config.cluster_tiles(border, problem.n), large
        below = config.below.cluster_tiles(problem.m - border, problem.n), others
        work = [(tiles, workers) for tiles, workers in (above, below) if tiles]
        if not all(workers for _, workers in work):
            return Bands(border, math.inf, math.inf)
        turns = max(ceil_div(tiles, workers) for tiles, workers in work)
        return Bands(border, turns, max(tiles / workers for tiles, workers in work))

    near = range(max(even - 2, 0), min(even + 3, count) + 1)
    found = map(dealt, sorted({*near, 0, count}))
    return min(found, key=lambda bands: (bands.turns, bands.tiles))


def clusters(problem: GemmProblem, config: WgmmaConfig, processors: int) -> int:
    """Return how many clusters a launch has: all that run at once, or as many as have work."""
    parts = min(PARTS_A_TILE, ceil_div(problem.k, TILE_K)) if config.stream else 1
    return min(config.cluster_tiles(problem.m, problem.n) * parts, processors // config.cluster)


def whole_tiles(tiles: int, workers: int) -> int:
    """Return how many tiles `stream` does not deal out: whole waves, but for the last one."""
    waves, others = divmod(tiles, workers)
    return workers * (max(waves - 1, 0) if others else waves)
