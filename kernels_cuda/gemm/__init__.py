"""The per-block INT8 GEMM in CUDA C++: `wgmma` for sm_90."""

from __future__ import annotations

from jetfire.kernels_cuda.gemm.wgmma import WgmmaGemm

KERNELS = (WgmmaGemm(),)
