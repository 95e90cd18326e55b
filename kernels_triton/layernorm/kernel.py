"""LayerNorm's Gluon kernel."""

from __future__ import annotations

from typing import Any

from jetfire.kernels_triton.gluon_norm import GluonNorm, NormConfig
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
    slopes = ("first", "second", "offset")

    def tile(self, problem: Any, config: NormConfig) -> dict[str, Any]:
        """Return those of every norm, and whether no tile reaches beyond the matrix."""
        whole = problem.m % problem.out_block == 0 and problem.n % config.tile_n == 0
        return {**super().tile(problem, config), "WHOLE": whole}
