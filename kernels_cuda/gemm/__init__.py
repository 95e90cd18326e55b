"""The per-block INT8 GEMM in CUDA C++: `wgmma` for sm_90, `mma` for sm_80 and later."""

from __future__ import annotations

from jetfire.kernels_cuda.gemm.mma import MmaGemm
from jetfire.kernels_cuda.gemm.wgmma import WgmmaGemm

KERNELS = (WgmmaGemm(), MmaGemm())
