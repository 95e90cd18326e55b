"""LayerNorm's Gluon kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jetfire.core.device import Device
from jetfire.kernels_triton.gluon_norm import RUN, GluonNorm, NormConfig
from jetfire.kernels_triton.layernorm import gluon


class GluonLayerNorm(GluonNorm):
    op = "layernorm"
    statistics = gluon.statistics_kernel
    normalise = gluon.normalise_kernel
    sums = gluon.sums_kernel
    finish = gluon.finish_kernel
    gradient = gluon.gradient_kernel
    by_row = ("plain", "along")
    by_column = ("dweight_parts", "dbias_parts")
    slopes = ("slope", "offset")

    def default(self, problem: Any, device: Device) -> NormConfig:
        """Return that of every norm; where it adds to a stream, half as much per thread at 128.

        There 64 elements per thread fit 128 registers, and an SM holds twice the warps.
        """
        config = super().default(problem, device)
        wide = problem.residual and problem.out_block == 128
        return replace(config, warps=8) if wide else config

    def tile(self, problem: Any, config: NormConfig) -> dict[str, Any]:
        """Return those of every norm, and whether no tile reaches beyond the matrix."""
        whole = problem.m % problem.out_block == 0 and problem.n % config.tile_n == 0
        found = {**super().tile(problem, config), "WHOLE": whole}
        if problem.mode == "bwd":
            found |= _register_limit(problem, config) if problem.residual else {"dsum_stride": None}
        return found


def _register_limit(problem: Any, config: NormConfig) -> dict[str, int]:
    """Return the option that has two tiles of 128×128 fit an SM, where it makes nothing spill.

    Without it 32 elements per thread take 80 registers and 64 take 158 (sm_90). Where rows of codes
    are not loaded 16 at a time, addresses take more.
    """
    held = problem.out_block * config.tile_n // (32 * config.warps)
    limit = {64: 128, 32: 64 if problem.out_block == 128 else None}.get(held)
    return {} if limit is None or problem.n % RUN else {"maxnreg": limit}
