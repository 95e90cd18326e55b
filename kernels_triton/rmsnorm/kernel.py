"""RMSNorm's Gluon kernel: configs, legality and launches."""

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
from jetfire.kernels_triton.rmsnorm import gluon
from jetfire.kernels_triton.tiles import quantised

RUN = 16
# The launch that adds up columns: parts at once, columns of a program and its warps.
PARTS, COLUMNS, COLUMN_WARPS = 128, 32, 8


@dataclass(frozen=True)
class RmsNormConfig(Config):
    """Choices of how a program goes through its row of blocks.

    Attributes:
        tile_n: columns at a time where it writes codes.
        sum_n: columns at a time where it adds up rows, before that.
        warps: warps of a program.
    """

    tile_n: int = 512
    sum_n: int = 1024
    warps: int = 16


class GluonRmsNorm(TritonKernel):
    op = "rmsnorm"
    name = "gluon"
    Config = RmsNormConfig

    def legal(self, problem: Any, config: RmsNormConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (8, 0):
            return "needs a CUDA device of sm_80 or newer"
        if (reason := unequal_blocks(problem)) is not None:
            return reason
        for name in ("tile_n", "sum_n", "warps"):
            value = getattr(config, name)
            if value < 1 or value & (value - 1):
                return f"{name}={value}: expected a power of two"
        if config.warps > 16:
            return f"warps={config.warps}: expected at most 16"
        for name in ("tile_n", "sum_n"):
            wide = getattr(config, name)
            if not problem.block <= wide <= 4096:
                return f"{name}={wide}: expected block={problem.block} to 4096"
            held = problem.block * wide // (32 * config.warps)
            if not RUN <= held <= 8 * RUN:
                return f"{name}={wide}: {held} elements per thread, expected {RUN} to {8 * RUN}"
        for name in ("m", "n"):
            if getattr(problem, name) > 2**31 - 2048:
                return f"{name}={getattr(problem, name)}: expected at most 2^31 - 2048"
        return None

    def default(self, problem: Any, device: Device) -> RmsNormConfig:
        """Return 32 elements per thread, and no tile of which half lies beyond the matrix."""
        warps, tile_n = 16, 512 * 32 // problem.block
        while tile_n >= 2 * max(problem.n, problem.block):
            tile_n, warps = tile_n // 2, warps // 2
        return RmsNormConfig(tile_n, 2 * tile_n, warps)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        columns = (32, 64, 128, 256, 512, 1024, 2048)
        return {"tile_n": columns, "sum_n": columns, "warps": (1, 2, 4, 8, 16)}

    def launch(
        self, problem: Any, config: RmsNormConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        m, n, x = problem.m, problem.n, inputs["x"]
        down = ceil_div(m, problem.block)
        given = [inputs[name] for name in ("x", "x_scale", "dy", "dy_scale") if name in inputs]
        sizes = (m, n, *(tensor.stride(0) for tensor in given))
        weight, seed, options = inputs["weight"], inputs.get("seed"), _options(problem, config)
        if problem.mode == "fwd":
            gluon.forward_kernel[(down,)](
                *given,
                weight,
                seed,
                *quantised(outputs),
                outputs["rstd"],
                *sizes,
                problem.eps,
                **options,
            )
            return
        parts = torch.empty((down, n), dtype=torch.float32, device=x.device)
        gluon.backward_kernel[(down,)](
            *given, weight, inputs["rstd"], seed, *quantised(outputs), parts, *sizes, **options
        )
        gluon.columns_kernel[(ceil_div(n, COLUMNS),)](
            parts,
            outputs["dweight"],
            n,
            down,
            P=PARTS,
            W=COLUMNS,
            layout=gl.BlockedLayout([1, 1], [1, 32], [COLUMN_WARPS, 1], [1, 0]),
            num_warps=COLUMN_WARPS,
        )


def _layout(block: int, columns: int, last: int, warps: int) -> gl.DistributedLinearLayout:
    """Return a tile's layout of runs: lanes along rows until a warp has whole blocks, if it can.

    At least two lanes lie along a row, and then read a whole sector of 32 bytes.
    """
    runs = columns // RUN
    held = block * runs // (32 * warps)
    return run_layout(block, runs, last, warps, min(runs, max(2, min(8, 32 * held // block))))


def _options(problem: Any, config: RmsNormConfig) -> dict[str, Any]:
    block, warps = problem.block, config.warps
    return {
        "SUM_RUNS": config.sum_n // RUN,
        "RUNS": config.tile_n // RUN,
        "BLOCK": block,
        "LAYOUT": problem.layout,
        "STOCHASTIC": problem.rounding == "stochastic",
        "sums": _layout(block, config.sum_n, RUN, warps),
        "layout": _layout(block, config.tile_n, RUN, warps),
        "pairs": _layout(block, config.tile_n, 2, warps),
        "qt_layout": qt_layout(block, warps),
        "num_warps": warps,
    }
