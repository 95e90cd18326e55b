"""RMSNorm's Gluon kernel: its launches."""

from __future__ import annotations

from typing import Any

import torch

from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.gluon_norm import (
    PLACES,
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
from jetfire.kernels_triton.rmsnorm import gluon
from jetfire.kernels_triton.tiles import quantised


class GluonRmsNorm(GluonNorm):
    op = "rmsnorm"

    def launch(self, problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
        (_backward if problem.mode == "bwd" else _forward)(problem, config, inputs, outputs)


def _forward(problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
    x, x_scale, rstd = inputs["x"], inputs["x_scale"], outputs["rstd"]
    sizes = (problem.m, problem.n, x.stride(0), x_scale.stride(0))
    gluon.statistics_kernel[statistics_grid(problem, config)](
        x, x_scale, rstd, *sizes, problem.eps, **statistics_options(problem, config)
    )
    gluon.normalise_kernel[tile_grid(problem, config)](
        x,
        x_scale,
        inputs["weight"],
        rstd,
        inputs.get("seed"),
        *quantised(outputs),
        *sizes,
        **tile_options(problem, config),
    )


def _backward(problem: Any, config: NormConfig, inputs: Tensors, outputs: Tensors) -> None:
    given = [inputs[name] for name in ("x", "x_scale", "dy", "dy_scale")]
    m, n, weight, rstd = problem.m, problem.n, inputs["weight"], inputs["rstd"]
    sizes = (m, n, *(tensor.stride(0) for tensor in given))
    across, down = sums_grid(problem, config)
    by_row, by_column, slope = (
        torch.empty(shape, dtype=torch.float32, device=rstd.device)
        for shape in ((across, m), (down, n), (m,))
    )
    gluon.sums_kernel[(across, down)](
        *given, weight, rstd, by_row, by_column, *sizes, **sums_options(problem, config)
    )
    row_programs = ceil_div(m, PLACES)
    gluon.finish_kernel[(row_programs + ceil_div(n, PLACES),)](
        by_row,
        by_column,
        rstd,
        slope,
        outputs["dweight"],
        m,
        n,
        across,
        down,
        row_programs,
        **finish_options(),
    )
    gluon.gradient_kernel[tile_grid(problem, config)](
        *given,
        weight,
        rstd,
        slope,
        inputs.get("seed"),
        *quantised(outputs),
        *sizes,
        **tile_options(problem, config),
    )
