"""RMSNorm's gradient in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from jetfire.kernels_cuda.norm_tiles import NormTiles


class RmsNormTiles(NormTiles):
    op = "rmsnorm"
    sums = ("dweight",)


KERNELS = (RmsNormTiles(),)
