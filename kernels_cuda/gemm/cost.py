"""A model of how long the sm_90a kernel takes, and the config that it says is fastest."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from jetfire.core.device import Device
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda import hopper
from jetfire.kernels_cuda.block_gemm import STEP_US, TILE_US
from jetfire.kernels_cuda.gemm.config import WgmmaConfig, bands, clusters, whole_tiles
from jetfire.kernels_cuda.hopper import TILE_K, WgmmaKernel

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

Fast = Literal["telescoped", "interleaved"]
# Microseconds of a step and of a tile's ends in the interleaved schedule, as block_gemm's in the
# telescoped one, at an H200's power cap. There the steps lose a tenth of what they gain at a fixed
# clock: products that follow each other more closely draw more power. With these numbers, and at
# most two blocks per cluster, the default was kept in all but one of the 32 products of blocks of
# 128 that `jetfire train tune` changed for the block of width 4096, its four layers and GPT-2 350M.
INTERLEAVED_US = {(2, 64): 0.275, (2, 96): 0.385, (2, 128): 0.43}
INTERLEAVED_TILE_US = TILE_US - 0.2
# What blocks of a cluster fetch once saves energy, hence time at the power cap: clusters of two
# take 0.95 to 0.98 of the time without, in trials of `jetfire train tune block` on an H200, and
# clusters of eight 0.96 to 0.98 of that for eight of its twelve products, by two of its runs.
SHARED_GAIN = {1: 1.0, 2: 0.96, 8: 0.93}
# What the second of two launches adds, not measured: products of some 20 µs keep clusters of two.
SECOND_US = 3.0
# Rows of cluster tiles that are walked column by column, by a cluster's blocks.
RASTERS: dict[Fast, dict[int, int]] = {
    "telescoped": {1: 8, 2: 16, 8: 4},
    "interleaved": {1: 8, 2: 16, 8: 16},
}
# For each further part of a tile a wait, and sums that are written and read at so many bytes per
# microsecond of a block. Fitted to what `stream` changed of nine problems with three tiles each on
# an H200 (blocks of 128, three outputs): off by 1.1 µs in the median, and by 2.9 with 1 µs a part.
PART_US, LEFT_BYTES = 3.0, 8e4
# What `stream` must gain by the model to be chosen: blocks that begin anywhere along K share less
# of what L2 holds. Where the operands of the tiles at work are more than `SPREAD` times its size
# they share nothing, and every tile's operands come from memory, at so many bytes per microsecond.
# On an H100 2048×1600×50304 and 8192×1024×50304 took 1.9 and 1.5 times as long as their tuned
# configs, which do not stream (158 and 129 MB at work, an L2 of 52; 3.3 and 4.4e6 bytes per µs). On
# an H200 8192×4096×22016 (80 MB) took as long with `stream` as without.
# The interleaved schedule needs more: on an H200 2304×768×16384, 8192×1600×6400 and 8192×1600×4800,
# for which the model had `stream` gain 5 or 6%, took 1.43, 1.05 and 1.03 times as long with it.
STREAM_GAIN, INTERLEAVED_STREAM_GAIN = 1.03, 1.07
SPREAD, APART_BYTES = 1.7, 4.4e6


@lru_cache(maxsize=4096)
def fastest(
    kernel: WgmmaKernel, problem: GemmProblem, device: Device, schedule: Fast | None = None
) -> WgmmaConfig:
    """Return the candidate, of this schedule, that should be fastest; every call of a model asks.

    Args:
        schedule: ``telescoped``, ``interleaved`` or None for either.
    """

    def price(config: WgmmaConfig) -> float:
        us = _microseconds(problem, config, device)
        if config.stream:
            return us * (INTERLEAVED_STREAM_GAIN if config.chains > 1 else STREAM_GAIN)
        return us * (SHARED_GAIN[config.cluster] if problem.block == TILE_K else 1)

    candidates = [c for c in _candidates(problem) if schedule in (None, c.schedule)]
    found: WgmmaConfig = hopper.fastest(kernel, problem, device, candidates, price)
    return found


def _candidates(problem: GemmProblem) -> list[WgmmaConfig]:
    """Return configs of every tile worth trying, with the other fields that suit it."""
    tiles: list[tuple[Fast, int, int]] = [("telescoped", *tile) for tile in STEP_US]
    if problem.block == TILE_K:
        tiles += [("interleaved", *tile) for tile in INTERLEAVED_US]
    # Transposed codes beside the sums of other blocks spill: a default does not.
    streams = (False,) if problem.layout != "q" else (False, True)
    return [
        _candidate(problem, *tile, stream, cluster)
        for tile in tiles
        for stream in streams
        for cluster in _clusters(problem, *tile, stream)
    ]


def _clusters(
    problem: GemmProblem, schedule: Fast, groups: int, tile_n: int, stream: bool
) -> tuple[tuple[int, int], ...]:
    """Return blocks of a cluster, down and across: of the largest tile of a schedule alone."""
    if (groups, tile_n) != (2 if schedule == "interleaved" else 3, 128):
        return ((1, 1),)
    if problem.block == TILE_K:
        return ((1, 1),) if stream else ((1, 1), (1, 2), (2, 4))
    # In smaller blocks clusters are a gain where outputs are large.
    return ((1, 2),) if problem.m * problem.n >= 1 << 27 else ((1, 1),)


def _candidate(
    problem: GemmProblem,
    schedule: Fast,
    groups: int,
    tile_n: int,
    stream: bool,
    cluster: tuple[int, int],
) -> WgmmaConfig:
    slot = (64 * groups + tile_n) * TILE_K
    stages = min(8, 180_000 // slot)
    takes_turns = problem.block == TILE_K and (groups, tile_n) == (3, 128)
    return WgmmaConfig(
        groups=groups,
        tile_n=tile_n,
        stages=stages,
        buffers=1 if stages * slot > 170_000 else 2,
        cluster_m=cluster[0],
        cluster_n=cluster[1],
        raster=RASTERS[schedule][cluster[0] * cluster[1]],
        in_flight=2 if takes_turns else 0,
        stream=stream,
        schedule=schedule,
    )


def estimate(problem: GemmProblem, config: WgmmaConfig, device: Device) -> float | None:
    """Estimate a launch's microseconds; None for a tile that was never measured."""
    known = INTERLEAVED_US if config.chains > 1 else STEP_US
    if config.rows > 1 or (config.groups, config.tile_n) not in known:
        return None
    return _microseconds(problem, config, device)


def _tile_us(problem: GemmProblem, config: WgmmaConfig) -> tuple[float, float]:
    """Return the microseconds of a step of 128 of K and of a tile's ends."""
    tile = config.groups, config.tile_n
    if config.chains > 1:
        return INTERLEAVED_US[tile], INTERLEAVED_TILE_US
    slow, fast = STEP_US[tile]
    return fast + (slow - fast) * {32: 1.0, 64: 0.23, 128: 0.0}[problem.block], TILE_US


def _microseconds(problem: GemmProblem, config: WgmmaConfig, device: Device) -> float:
    """Estimate microseconds by waves of tiles, or by an even share of all steps."""
    step_us, ends_us = _tile_us(problem, config)
    steps, tiles = ceil_div(problem.k, TILE_K), config.cluster_tiles(problem.m, problem.n)
    workers = device.sms // config.cluster
    if config.banded:
        return _turns(problem, config, device) * (steps * step_us + ends_us) + SECOND_US
    if not config.stream or whole_tiles(tiles, workers) == tiles:
        return ceil_div(tiles, workers) * (steps * step_us + ends_us)
    workers = clusters(problem, config, device.sms)
    share, parts = tiles * steps / workers, workers / tiles
    left_us = max(2, parts) * 4 * config.tile_m * config.tile_n / LEFT_BYTES
    even_us = share * step_us + (share / steps + 1) * ends_us + max(1, parts) * PART_US + left_us
    return max(even_us, _reading_us(problem, config, device, tiles))


def _turns(problem: GemmProblem, config: WgmmaConfig, device: Device) -> float:
    """Return how many tiles a block of two launches computes in turn.

    Large clusters are taken to hold 10 of 11 multiprocessors, as an H200's 120 of 132.
    """
    large = device.sms * 10 // 11 // config.cluster
    return bands(problem, config, large, (device.sms - large * config.cluster) // 2).turns


def _reading_us(problem: GemmProblem, config: WgmmaConfig, device: Device, tiles: int) -> float:
    """Estimate microseconds of reading operands from memory where tiles share none in L2; else 0.

    It is 0 where the size of L2 is not known.
    """
    tile_m, tile_n = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
    rows = min(config.raster, ceil_div(problem.m, config.tile_m)) * config.tile_m
    columns = device.sms * config.tile_m * config.tile_n // rows
    at_work = (rows + min(columns, problem.n)) * problem.k
    if not device.l2_bytes or at_work <= SPREAD * device.l2_bytes:
        return 0.0
    return tiles * (tile_m + tile_n) * problem.k / APART_BYTES
