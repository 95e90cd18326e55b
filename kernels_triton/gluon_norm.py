"""Configs, legality and launch options of the Gluon kernels of LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton.experimental.gluon import language as gl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import ceil_div
from jetfire.kernels_triton.gluon_rows import qt_layout, run_layout
from jetfire.kernels_triton.kernel import TritonKernel

RUN = 16
# A warp of the backward sums: rows and runs of a step, and registers. With 128 it spilled nothing
# and took as long; with 96 a third longer (LayerNorm, H200).
STEP_ROWS, STEP_RUNS, STEP_REGISTERS = 8, 16, 168
# The launch that adds up the parts of these sums: places of a program, parts at once, warps.
PLACES, PARTS, PARTS_WARPS = 32, 32, 8


@dataclass(frozen=True)
class NormConfig(Config):
    """Choices of how rows and tiles are divided.

    Attributes:
        tile_n: columns of a program that writes a row of blocks; warps: its warps.
        rows: rows that a program of one warp takes statistics of (forward).
        steps: steps of eight rows that a warp adds up (backward).
    """

    tile_n: int = 64
    warps: int = 1
    rows: int = 4
    steps: int = 8


SPACE: dict[str, Sequence[Any]] = {
    "tile_n": (32, 64, 128, 256),
    "warps": (1, 2, 4, 8, 16),
    "rows": (1, 2, 4, 8),
    "steps": (4, 8, 16, 32),
}


class GluonNorm(TritonKernel):
    """A norm whose statistics, sums and tiles are launches of their own."""

    name = "gluon"
    Config = NormConfig

    def legal(self, problem: Any, config: NormConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
            return "needs a CUDA device of sm_80 or newer"
        for name in ("tile_n", "warps", "rows", "steps"):
            value = getattr(config, name)
            if value < 1 or value & (value - 1):
                return f"{name}={value}: expected a power of two"
        if not problem.out_block <= config.tile_n <= 1024:
            return f"tile_n={config.tile_n}: expected out_block={problem.out_block} to 1024"
        held = problem.out_block * config.tile_n // (32 * config.warps)
        if not RUN <= held <= 8 * RUN or config.warps > 16:
            return f"{held} elements per thread, {config.warps} warps: expected 16 to 128, up to 16"
        if config.rows > 8 or config.steps > 32:
            return f"rows={config.rows} steps={config.steps}: expected at most 8 and 32"
        if ceil_div(problem.m, problem.out_block) > 65535:
            return f"m={problem.m}: expected at most 65535 rows of blocks"
        down = ceil_div(problem.m, STEP_ROWS * config.steps)
        if problem.mode == "bwd" and down > 65535:
            return f"m={problem.m} steps={config.steps}: expected at most 65535 programs down"
        return None

    def default(self, problem: Any, device: Device) -> NormConfig:
        tile_n, warps = {32: (64, 1), 64: (64, 2), 128: (128, 4)}[problem.out_block]
        return NormConfig(tile_n, warps)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE


def tile_options(problem: Any, config: NormConfig) -> dict[str, Any]:
    """Return the options of a kernel that writes a row of blocks."""
    rows, runs = problem.out_block, config.tile_n // RUN
    shape = (rows, runs)
    across = min(4, runs)
    return {
        "RUNS": runs,
        "BLOCK": problem.block,
        "OUT_BLOCK": rows,
        "LAYOUT": problem.layout,
        "STOCHASTIC": problem.rounding == "stochastic",
        "layout": run_layout(*shape, RUN, config.warps, across),
        "pairs": run_layout(*shape, 2, config.warps, across),
        "qt_layout": qt_layout(rows, config.warps),
        "num_warps": config.warps,
    }


def tile_grid(problem: Any, config: NormConfig) -> tuple[int, int]:
    """Return the grid of a kernel that writes a row of blocks per program."""
    return ceil_div(problem.n, config.tile_n), ceil_div(problem.m, problem.out_block)


def statistics_grid(problem: Any, config: NormConfig) -> tuple[int]:
    """Return how many warps take statistics of whole rows."""
    return (ceil_div(problem.m, config.rows),)


def statistics_options(problem: Any, config: NormConfig) -> dict[str, Any]:
    """Return the options of a kernel of one warp that takes statistics of whole rows."""
    runs = 32 if problem.n <= 512 else 64
    return {
        "R": config.rows,
        "RUNS": runs,
        "BLOCK": problem.block,
        "layout": run_layout(config.rows, runs, RUN, 1, 32),
        "num_warps": 1,
    }


def sums_grid(problem: Any, config: NormConfig) -> tuple[int, int]:
    """Return how many warps lie across and down where the backward sums are taken."""
    return ceil_div(problem.n, STEP_RUNS * RUN), ceil_div(problem.m, STEP_ROWS * config.steps)


def sums_options(problem: Any, config: NormConfig) -> dict[str, Any]:
    """Return the options of a kernel of one warp that adds up rows and columns."""
    return {
        "R": STEP_ROWS,
        "STEPS": config.steps,
        "RUNS": STEP_RUNS,
        "BLOCK": problem.block,
        "num_warps": 1,
        "maxnreg": STEP_REGISTERS,
        "layout": run_layout(STEP_ROWS, STEP_RUNS, RUN, 1, STEP_RUNS),
    }


@cache
def finish_options() -> dict[str, Any]:
    """Return the options of a kernel that adds up the parts of such sums."""
    return {
        "P": PARTS,
        "W": PLACES,
        "layout": gl.BlockedLayout([1, 1], [1, 32], [PARTS_WARPS, 1], [1, 0]),
        "num_warps": PARTS_WARPS,
    }
