"""The INT8 GEMM with fallback in CUDA C++, for sm_90."""

from __future__ import annotations

from jetfire.kernels_cuda.fallback_gemm.wgmma import WgmmaFallback

KERNELS = (WgmmaFallback(),)
