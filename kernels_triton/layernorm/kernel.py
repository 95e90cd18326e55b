"""LayerNorm's Gluon kernel: configs, legality and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.problem import unequal_blocks
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.gluon_rows import qt_layout, run_layout
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.kernels_triton.layernorm import gluon
from jetfire.kernels_triton.tiles import quantised

RUN = 16
# A warp of the backward sums: rows and runs of a step, and registers. With 128 it spilled nothing
# and took as long; with 96 a third longer (H200).
STEP_ROWS, STEP_RUNS, STEP_REGISTERS = 8, 16, 168


@dataclass(frozen=True)
class LayerNormConfig(Config):
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


class GluonLayerNorm(TritonKernel):
    op = "layernorm"
    name = "gluon"
    Config = LayerNormConfig

    def legal(self, problem: Any, config: LayerNormConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
            return "needs a CUDA device of sm_80 or newer"
        if (reason := unequal_blocks(problem)) is not None:
            return reason
        for name in ("tile_n", "warps", "rows", "steps"):
            value = getattr(config, name)
            if value < 1 or value & (value - 1):
                return f"{name}={value}: expected a power of two"
        if not problem.block <= config.tile_n <= 1024:
            return f"tile_n={config.tile_n}: expected block={problem.block} to 1024"
        held = problem.block * config.tile_n // (32 * config.warps)
        if not RUN <= held <= 8 * RUN or config.warps > 16:
            return f"{held} elements per thread, {config.warps} warps: expected 16 to 128, up to 16"
        if config.rows > 8 or config.steps > 32:
            return f"rows={config.rows} steps={config.steps}: expected at most 8 and 32"
        if ceil_div(problem.m, problem.block) > 65535:
            return f"m={problem.m}: expected at most 65535 rows of blocks"
        down = ceil_div(problem.m, STEP_ROWS * config.steps)
        if problem.mode == "bwd" and down > 65535:
            return f"m={problem.m} steps={config.steps}: expected at most 65535 programs down"
        return None

    def default(self, problem: Any, device: Device) -> LayerNormConfig:
        tile_n, warps = {32: (64, 1), 64: (64, 2), 128: (128, 4)}[problem.block]
        return LayerNormConfig(tile_n, warps)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def launch(
        self, problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        (_backward if problem.mode == "bwd" else _forward)(problem, config, inputs, outputs)


def _tile(problem: Any, config: LayerNormConfig) -> dict[str, Any]:
    """Return the options of a kernel that writes a row of blocks."""
    block, runs = problem.block, config.tile_n // RUN
    shape = (block, runs)
    across = min(4, runs)
    return {
        "RUNS": runs,
        "BLOCK": block,
        "LAYOUT": problem.layout,
        "STOCHASTIC": problem.rounding == "stochastic",
        "WHOLE": problem.m % block == 0 and problem.n % config.tile_n == 0,
        "layout": run_layout(*shape, RUN, config.warps, across),
        "pairs": run_layout(*shape, 2, config.warps, across),
        "qt_layout": qt_layout(block, config.warps),
        "num_warps": config.warps,
    }


def _grid(problem: Any, config: LayerNormConfig) -> tuple[int, int]:
    return ceil_div(problem.n, config.tile_n), ceil_div(problem.m, problem.block)


def _forward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, m, n = inputs["x"], inputs["x_scale"], problem.m, problem.n
    sizes = (m, n, x.stride(0), x_scale.stride(0))
    statistics = inputs if problem.stats == "given" else outputs
    mean, rstd = statistics["mean"], statistics["rstd"]
    if problem.stats == "row":
        runs = 32 if n <= 512 else 64
        gluon.statistics_kernel[(ceil_div(m, config.rows),)](
            x,
            x_scale,
            mean,
            rstd,
            *sizes,
            problem.eps,
            R=config.rows,
            RUNS=runs,
            BLOCK=problem.block,
            layout=run_layout(config.rows, runs, RUN, 1, 32),
            num_warps=1,
        )
    gluon.normalise_kernel[_grid(problem, config)](
        x,
        x_scale,
        inputs["weight"],
        inputs["bias"],
        mean,
        rstd,
        inputs.get("seed"),
        *quantised(outputs),
        *sizes,
        **_tile(problem, config),
    )


def _backward(problem: Any, config: LayerNormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, dy, dy_scale = (inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
    m, n, mean, rstd = problem.m, problem.n, inputs["mean"], inputs["rstd"]
    sizes = (m, n, x.stride(0), x_scale.stride(0), dy.stride(0), dy_scale.stride(0))
    across = ceil_div(n, STEP_RUNS * RUN)
    down = ceil_div(m, STEP_ROWS * config.steps)
    by_row = torch.empty((2, across, m), dtype=torch.float32, device=x.device)
    by_column = torch.empty((2, down, n), dtype=torch.float32, device=x.device)
    slope_offset = torch.empty((2, m), dtype=torch.float32, device=x.device)
    gluon.sums_kernel[(across, down)](
        x,
        x_scale,
        dy,
        dy_scale,
        inputs["weight"],
        mean,
        rstd,
        *by_row,
        *by_column,
        *sizes,
        R=STEP_ROWS,
        STEPS=config.steps,
        RUNS=STEP_RUNS,
        BLOCK=problem.block,
        num_warps=1,
        maxnreg=STEP_REGISTERS,
        layout=run_layout(STEP_ROWS, STEP_RUNS, RUN, 1, STEP_RUNS),
    )
    wide, parts, warps = 32, 32, 8
    row_programs = ceil_div(m, wide)
    gluon.finish_kernel[(row_programs + ceil_div(n, wide),)](
        *by_row,
        *by_column,
        mean,
        rstd,
        *slope_offset,
        outputs["dweight"],
        outputs["dbias"],
        m,
        n,
        across,
        down,
        row_programs,
        P=parts,
        W=wide,
        layout=gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0]),
        num_warps=warps,
    )
    gluon.gradient_kernel[_grid(problem, config)](
        x,
        x_scale,
        dy,
        dy_scale,
        inputs["weight"],
        rstd,
        *slope_offset,
        inputs.get("seed"),
        *quantised(outputs),
        *sizes,
        **_tile(problem, config),
    )
