"""The configs of sm_90a kernels by blocks: how they cut and feed their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda.hopper import TILE_K, TileConfig

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

# With `stream`, where tiles are fewer than multiprocessors, at most this many blocks for each: one
# reads what the others of a tile leave. It waits for the first parts of blocks after it: all must
# get to run, which they do, being no more than the multiprocessors, once whatever else is running
# ends.
PARTS_A_TILE = 4


@dataclass(frozen=True)
class BlockGemmConfig(TileConfig):
    """Choices of the kernels on block_gemm.cuh.

    Attributes:
        in_flight: groups that may multiply at once; 0 for all.
        schedule: of the promotion; ``exact`` rounds as the reference does (but for `stream`), and
            ``telescoped``, which `default` takes, within `noise`.
    """

    groups: int = 3
    in_flight: Literal[0, 1, 2] = 0
    schedule: Literal["exact", "telescoped"] = "exact"

    @property
    def telescoped(self) -> bool:
        return self.schedule == "telescoped"


@dataclass(frozen=True)
class WgmmaConfig(BlockGemmConfig):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        stream: stream-K: deal K of the last tiles out evenly to all blocks; of those that share a
            tile one adds up what the others leave in memory.
    """

    stream: bool = False


def clusters(problem: GemmProblem, config: WgmmaConfig, processors: int) -> int:
    """Return how many clusters a launch has: all that run at once, or as many as have work."""
    parts = min(PARTS_A_TILE, ceil_div(problem.k, TILE_K)) if config.stream else 1
    return min(config.cluster_tiles(problem.m, problem.n) * parts, processors // config.cluster)


def whole_tiles(tiles: int, workers: int) -> int:
    """Return how many tiles `stream` does not deal out: whole waves, but for the last one."""
    waves, others = divmod(tiles, workers)
    return workers * (max(waves - 1, 0) if others else waves)
