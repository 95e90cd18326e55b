"""The per-block INT8 GEMM on tensor cores: `gluon` for sm_90, `triton` for every other one."""

from __future__ import annotations

from jetfire.kernels_triton.gemm.hopper import GluonGemm
from jetfire.kernels_triton.gemm.portable import TritonGemm

# The first legal one is chosen.
KERNELS = (GluonGemm(), TritonGemm())
