"""LayerNorm's Gluon kernel: its launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.gluon_norm import (
    PLACES,
    RUN,
    GluonNorm,
    NormConfig,
    finish_options,
    statistics_grid,
    statistics_options,
    sums_grid,
    sums_options,
    tile_grid,
    tile_options,
)
from jetfire.kernels_triton.layernorm import gluon
from jetfire.kernels_triton.tiles import quantised


class GluonLayerNorm(GluonNorm):
    op = "layernorm"

    def default(self, problem: Any, device: Device) -> NormConfig:
        """Return that of every norm; where it adds to a stream, half as much per thread at 128.

        There 64 elements per thread fit 128 registers, and an SM holds twice the warps.
        """
        config = super().default(problem, device)
        wide = problem.residual and problem.out_block == 128
        return replace(config, warps=8) if wide else config

    def launch(self, problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
        (_backward if problem.mode == "bwd" else _forward)(problem, config, inputs, outputs)


def _is_whole(problem: Any, config: NormConfig) -> bool:
    """Return whether no tile reaches beyond the matrix."""
    return problem.m % problem.out_block == 0 and problem.n % config.tile_n == 0


def _forward(problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, m, n = inputs["x"], inputs["x_scale"], problem.m, problem.n
    sizes = (m, n, x.stride(0), x_scale.stride(0))
    statistics = inputs if problem.stats == "given" else outputs
    mean, rstd = statistics["mean"], statistics["rstd"]
    if problem.stats == "row":
        gluon.statistics_kernel[statistics_grid(problem, config)](
            x, x_scale, mean, rstd, *sizes, problem.eps, **statistics_options(problem, config)
        )
    gluon.normalise_kernel[tile_grid(problem, config)](
        x,
        x_scale,
        inputs["weight"],
        inputs["bias"],
        mean,
        rstd,
        inputs.get("seed"),
        *quantised(outputs),
        *sizes,
        WHOLE=_is_whole(problem, config),
        **tile_options(problem, config),
    )


def _backward(problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, dy, dy_scale = (inputs[name] for name in ("x", "x_scale", "dy", "dy_scale"))
    m, n, mean, rstd = problem.m, problem.n, inputs["mean"], inputs["rstd"]
    sizes = (m, n, x.stride(0), x_scale.stride(0), dy.stride(0), dy_scale.stride(0))
    across, down = sums_grid(problem, config)
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
        **sums_options(problem, config),
    )
    row_programs = ceil_div(m, PLACES)
    gluon.finish_kernel[(row_programs + ceil_div(n, PLACES),)](
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
        **finish_options(),
    )
    dsum = inputs.get("dsum")
    gluon.gradient_kernel[tile_grid(problem, config)](
        x,
        x_scale,
        dy,
        dy_scale,
        inputs["weight"],
        rstd,
        *slope_offset,
        dsum,
        inputs.get("seed"),
        outputs.get("dx"),
        *quantised(outputs),
        *sizes,
        None if dsum is None else dsum.stride(0),
        RESIDUAL=problem.residual,
        WHOLE=_is_whole(problem, config),
        **tile_options(problem, config),
        **(_register_limit(problem, config) if problem.residual else {}),
    )


def _register_limit(problem: Any, config: NormConfig) -> dict[str, int]:
    """Return the option that has two tiles of 128×128 fit an SM, where it makes nothing spill.

    Without it 32 elements per thread take 80 registers and 64 take 158 (sm_90). Where rows of codes
    are not loaded 16 at a time, addresses take more.
    """
    held = problem.out_block * config.tile_n // (32 * config.warps)
    limit = {64: 128, 32: 64 if problem.out_block == 128 else None}.get(held)
    return {} if limit is None or problem.n % RUN else {"maxnreg": limit}
