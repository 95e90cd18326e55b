"""The Gluon kernels of LayerNorm and RMSNorm: configs, legality and launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from triton.experimental.gluon import language as gl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.gluon_rows import qt_layout, run_layout
from jetfire.kernels_triton.kernel import Launch, TritonKernel
from jetfire.kernels_triton.tiles import power_reason

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


class GluonNorm(TritonKernel):
    """A norm whose statistics, sums and tiles are launches of their own.

    Attributes:
        statistics, normalise: the functions of forward.
        sums, finish, gradient: those of backward.
        by_row, by_column: what `sums` adds up over parts of rows, and of columns.
        slopes: what `finish` makes of the sums over rows.
    """

    name = "gluon"
    Config = NormConfig
    choices: ClassVar = {
        "tile_n": (32, 64, 128, 256),
        "warps": (1, 2, 4, 8, 16),
        "rows": (1, 2, 4, 8),
        "steps": (4, 8, 16, 32),
    }
    statistics: ClassVar[Any]
    normalise: ClassVar[Any]
    sums: ClassVar[Any]
    finish: ClassVar[Any]
    gradient: ClassVar[Any]
    by_row: ClassVar[tuple[str, ...]]
    by_column: ClassVar[tuple[str, ...]]
    slopes: ClassVar[tuple[str, ...]]

    def legal(self, problem: Any, config: NormConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
            return "needs a CUDA device of sm_80 or newer"
        if (reason := power_reason(config, "tile_n", "warps", "rows", "steps")) is not None:
            return reason
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
        """Return 64 elements per thread, 128 in blocks of 128.

        Where a gradient joins a stream's, 64: they fit 128 registers, and an SM holds twice the
        warps.
        """
        tile_n, warps = {32: (64, 1), 64: (64, 2), 128: (128, 4)}[problem.out_block]
        wide = problem.residual and problem.out_block == 128
        return NormConfig(tile_n, 2 * warps if wide else warps)

    def tile(self, problem: Any, config: NormConfig) -> dict[str, Any]:
        """Return the constants of a function that writes a row of blocks per program."""
        rows, runs = problem.out_block, config.tile_n // RUN
        across = min(4, runs)
        found = {
            "RUNS": runs,
            "layout": run_layout(rows, runs, RUN, config.warps, across),
            "pairs": run_layout(rows, runs, 2, config.warps, across),
            "qt_layout": qt_layout(rows, config.warps),
        }
        if problem.mode == "bwd":
            found |= _register_limit(problem, config) if problem.residual else {"dsum_stride": None}
        return found

    def launches(self, problem: Any, config: NormConfig, device: Device) -> Sequence[Launch]:
        backward = problem.mode == "bwd"
        return (self._backward if backward else self._forward)(problem, config)

    def _forward(self, problem: Any, config: NormConfig) -> Sequence[Launch]:
        """Return the launch of warps that take whole rows, where it is wanted, and of tiles."""
        runs = 32 if problem.n <= 512 else 64
        whole = {
            "R": config.rows,
            "RUNS": runs,
            "layout": run_layout(config.rows, runs, RUN, 1, 32),
            "num_warps": 1,
        }
        grid, tiles = (ceil_div(problem.m, config.rows),), self.tile(problem, config)
        found = (
            Launch(self.statistics, grid, problem, config, **whole),
            Launch(self.normalise, tile_grid(problem, config), problem, config, **tiles),
        )
        return found if getattr(problem, "stats", "row") == "row" else found[1:]

    def _backward(self, problem: Any, config: NormConfig) -> Sequence[Launch]:
        """Return the launches of warps that add up, of those that add up their parts, of tiles."""
        grid = across, down = sums_grid(problem, config)
        rows = ceil_div(problem.m, PLACES)
        programs = (rows + ceil_div(problem.n, PLACES),)
        added = {
            "R": STEP_ROWS,
            "RUNS": STEP_RUNS,
            "layout": run_layout(STEP_ROWS, STEP_RUNS, RUN, 1, STEP_RUNS),
            "num_warps": 1,
            "maxnreg": STEP_REGISTERS,
        }
        finished = {
            "across": across,
            "down": down,
            "row_programs": rows,
            "P": PARTS,
            "W": PLACES,
            "layout": gl.BlockedLayout([1, 1], [1, 32], [PARTS_WARPS, 1], [1, 0]),
            "num_warps": PARTS_WARPS,
        }
        tiles = self.tile(problem, config)
        parts = {f"{name.removesuffix('_parts')}_ptr": name for name in self.by_column}
        return (
            Launch(self.sums, grid, problem, config, parts, **added),
            Launch(self.finish, programs, problem, config, **finished),
            Launch(
                self.gradient,
                tile_grid(problem, config),
                problem,
                config,
                {"total_ptr": "dx"},
                **tiles,
            ),
        )

    def tensors(
        self, problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        if problem.mode == "fwd":
            return {**inputs, **outputs}
        (m, n), (across, down) = (problem.m, problem.n), sums_grid(problem, config)
        return {
            **inputs,
            **outputs,
            **_empty(self.by_row, (across, m), inputs["x"].device),
            **_empty(self.by_column, (down, n), inputs["x"].device),
            **_empty(self.slopes, (m,), inputs["x"].device),
        }


def _empty(names: tuple[str, ...], shape: tuple[int, ...], device: torch.device) -> Tensors:
    """Return uninitialised fp32 of one shape by name, in one allocation."""
    if len(names) == 1:
        return {names[0]: torch.empty(shape, dtype=torch.float32, device=device)}
    parts = torch.empty((len(names), *shape), dtype=torch.float32, device=device)
    return dict(zip(names, parts, strict=True))


def _register_limit(problem: Any, config: NormConfig) -> dict[str, int]:
    """Return the option that has two tiles of 128×128 fit an SM, where it makes nothing spill.

    Without it 32 elements per thread take 80 registers and 64 take 158 (LayerNorm, sm_90). Where
    rows of codes are not loaded 16 at a time, addresses take more.
    """
    held = problem.out_block * config.tile_n // (32 * config.warps)
    limit = {64: 128, 32: 64 if problem.out_block == 128 else None}.get(held)
    return {} if limit is None or problem.n % RUN else {"maxnreg": limit}


def tile_grid(problem: Any, config: NormConfig) -> tuple[int, int]:
    """Return the grid of a function that writes a row of blocks per program."""
    return ceil_div(problem.n, config.tile_n), ceil_div(problem.m, problem.out_block)


def sums_grid(problem: Any, config: NormConfig) -> tuple[int, int]:
    """Return how many warps lie across and down where the backward sums are taken."""
    return ceil_div(problem.n, STEP_RUNS * RUN), ceil_div(problem.m, STEP_ROWS * config.steps)
