"""RMSNorm's Gluon kernel."""

from __future__ import annotations

from jetfire.kernels_triton.gluon_norm import GluonNorm
from jetfire.kernels_triton.rmsnorm import gluon


class GluonRmsNorm(GluonNorm):
    op = "rmsnorm"
    statistics = gluon.statistics_kernel
    normalise = gluon.normalise_kernel
    sums = gluon.sums_kernel
    finish = gluon.finish_kernel
    gradient = gluon.gradient_kernel
    by_row = ("along",)
    by_column = ("dweight_parts",)
    slopes = ("first", "second")
