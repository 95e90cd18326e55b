"""The sm_90a kernel's config, and how many clusters and whole tiles a launch of it has."""

from __future__ import annotations

from dataclasses import dataclass
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


def clusters(problem: GemmProblem, config: WgmmaConfig, processors: int) -> int:
    """Return how many clusters a launch has: all that run at once, or as many as have work."""
    parts = min(PARTS_A_TILE, ceil_div(problem.k, TILE_K)) if config.stream else 1
    return min(config.cluster_tiles(problem.m, problem.n) * parts, processors // config.cluster)


def whole_tiles(tiles: int, workers: int) -> int:
    """Return how many tiles `stream` does not deal out: whole waves, but for the last one."""
    waves, others = divmod(tiles, workers)
    return workers * (max(waves - 1, 0) if others else waves)
