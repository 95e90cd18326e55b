"""The INT4 GEMM in CUDA C++: `wgmma` for sm_90, `mma` for sm_80 and later."""

from __future__ import annotations

from jetfire.core.kernel import Kernel
from jetfire.kernels_cuda.int4_gemm.mma import MmaInt4Gemm
from jetfire.kernels_cuda.int4_gemm.wgmma import WgmmaInt4Gemm

KERNELS: tuple[Kernel, ...] = (WgmmaInt4Gemm(), MmaInt4Gemm())
