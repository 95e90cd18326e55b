"""A model of how long the sm_90a kernel takes, and the config that it says is fastest."""

from __future__ import annotations

import functools
from functools import lru_cache
from typing import TYPE_CHECKING

from jetfire.core.device import Device
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda import hopper
from jetfire.kernels_cuda.hopper import TILE_K, WgmmaKernel
from jetfire.kernels_cuda.int4_gemm.config import SPACE, WgmmaConfig, cluster_tiles

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

# Groups, rows, columns and cluster of the tiles that did best somewhere on an H200.
TILES = (
    (3, 1, 192, 2, 1),
    (2, 2, 128, 1, 2),
    (3, 1, 192, 1, 1),
    (2, 2, 128, 1, 1),
    (2, 1, 192, 1, 1),
    (2, 1, 128, 1, 1),
    (1, 2, 96, 1, 1),
    (1, 1, 128, 1, 1),
    (1, 1, 64, 1, 1),
)
# A multiprocessor's products of codes in a microsecond, and what a step and a tile take besides, in
# microseconds: fitted to waves of each tile, of 1024 and of 8192 of K, on an H200.
RATE = 4096 * 1900
STEP_US, TILE_US = 0.045, 2.5
# What a split product adds: a launch, and bytes of raw sums per microsecond, written and read.
REDUCE_US, REDUCE_BYTES = 4.0, 2.5e6
# Products of so many tiles a multiprocessor share their operands' loads: 15360×8704×10752 took
# 1913 µs, not 2017.
SHARED_WAVES = 4


@lru_cache(maxsize=4096)
def fastest(kernel: WgmmaKernel, problem: Int4GemmProblem, device: Device) -> WgmmaConfig:
    """Return the candidate that should be fastest; every call of a model asks."""
    price = functools.partial(estimate, problem, device=device)
    found: WgmmaConfig = hopper.fastest(kernel, problem, device, _candidates(), price)
    return found


@functools.cache
def _candidates() -> list[WgmmaConfig]:
    """Return every tile, with the deepest ring that fits, and every split of K."""
    found = []
    for groups, rows, tile_n, cluster_m, cluster_n in TILES:
        stages = min(8, 200_000 // ((64 * groups * rows + tile_n) * TILE_K))
        for split in SPACE["split"]:
            found.append(
                WgmmaConfig(
                    groups=groups,
                    rows=rows,
                    tile_n=tile_n,
                    stages=stages,
                    cluster_m=cluster_m,
                    cluster_n=cluster_n,
                    split=split,
                )
            )
    return found


def estimate(problem: Int4GemmProblem, config: WgmmaConfig, device: Device) -> float:
    """Estimate a launch's microseconds: waves of tiles, and what splitting costs."""
    workers = device.sms // config.cluster
    waves = ceil_div(cluster_tiles(problem, config), workers)
    steps = ceil_div(ceil_div(problem.k, TILE_K), config.split)
    step_us = config.tile_m * config.tile_n * TILE_K / RATE + STEP_US
    # The last wave of a large product hides behind nothing; small ones gain nothing by sharing.
    lonely = 1.0 if config.cluster > 1 or waves < SHARED_WAVES else 1.03
    shared = 1.0 if config.cluster == 1 or waves >= SHARED_WAVES else 1.03
    microseconds = waves * (steps * step_us + TILE_US) * lonely * shared
    if config.split > 1:
        raw = 8 * config.split * problem.m * problem.n
        microseconds += REDUCE_US + raw / REDUCE_BYTES
    return microseconds
