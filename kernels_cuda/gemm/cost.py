"""A model of how long the sm_90a kernel takes, and the config that it says is fastest."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from jetfire.core.device import Device
from jetfire.core.tensors import ceil_div
from jetfire.kernels_cuda import hopper
from jetfire.kernels_cuda.block_gemm import STEP_US, TILE_US
from jetfire.kernels_cuda.gemm.config import WgmmaConfig, clusters, whole_tiles
from jetfire.kernels_cuda.hopper import TILE_K, WgmmaKernel

if TYPE_CHECKING:
    from jetfire.ops.gemm import GemmProblem

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
STREAM_GAIN = 1.03
SPREAD, APART_BYTES = 1.7, 4.4e6


@lru_cache(maxsize=4096)
def fastest(kernel: WgmmaKernel, problem: GemmProblem, device: Device) -> WgmmaConfig:
    """Return the candidate that should be fastest; every call of a model asks."""

    def price(config: WgmmaConfig) -> float:
        return _microseconds(problem, config, device) * (STREAM_GAIN if config.stream else 1)

    found: WgmmaConfig = hopper.fastest(kernel, problem, device, _candidates(problem), price)
    return found


def _candidates(problem: GemmProblem) -> list[WgmmaConfig]:
    """Return configs of every tile worth trying, with the other fields that suit it."""
    found = []
    # Transposed codes beside the sums of other blocks spill: a default does not.
    streams = (False,) if problem.layout != "q" else (False, True)
    # Clusters of two share operands, and begin and end together: 1 to 10% more time in all six
    # outputs so large that were tuned with at most 2048 along K (blocks of 128).
    most = 1 << 26 if problem.block == 128 else 1 << 27
    large = problem.m * problem.n >= most and (problem.block != 128 or problem.k > 2048)
    for groups, tile_n in STEP_US:
        tile_m = 64 * groups
        stages = min(8, 180_000 // ((tile_m + tile_n) * TILE_K))
        turns: Literal[0, 2] = 2 if problem.block == 128 and (groups, tile_n) == (3, 128) else 0
        share = 2 if large and (groups, tile_n) == (3, 128) else 1
        for stream in streams:
            config = WgmmaConfig(
                groups=groups,
                tile_n=tile_n,
                stages=stages,
                buffers=1 if stages * (tile_m + tile_n) * TILE_K > 170_000 else 2,
                cluster_n=share,
                raster=8 * share,
                in_flight=turns,
                stream=stream,
                schedule="telescoped",
            )
            found.append(config)
    return found


def estimate(problem: GemmProblem, config: WgmmaConfig, device: Device) -> float | None:
    """Estimate a launch's microseconds; None for a tile that was never measured."""
    known = (config.groups, config.tile_n) in STEP_US and config.rows == 1
    return _microseconds(problem, config, device) if known else None


def _microseconds(problem: GemmProblem, config: WgmmaConfig, device: Device) -> float:
    """Estimate microseconds by waves of tiles, or by an even share of all steps."""
    slow, fast = STEP_US[config.groups, config.tile_n]
    step_us = fast + (slow - fast) * {32: 1.0, 64: 0.23, 128: 0.0}[problem.block]
    steps, tiles = ceil_div(problem.k, TILE_K), config.cluster_tiles(problem.m, problem.n)
    workers = device.sms // config.cluster
    if not config.stream or whole_tiles(tiles, workers) == tiles:
        return ceil_div(tiles, workers) * (steps * step_us + TILE_US)
    workers = clusters(problem, config, device.sms)
    share, parts = tiles * steps / workers, workers / tiles
    left_us = max(2, parts) * 4 * config.tile_m * config.tile_n / LEFT_BYTES
    even_us = share * step_us + (share / steps + 1) * TILE_US + max(1, parts) * PART_US + left_us
    return max(even_us, _reading_us(problem, config, device, tiles))


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
