"""RMSNorm on quantised tensors, forward and backward."""

from __future__ import annotations

from jetfire.kernels_triton.rmsnorm.kernel import GluonRmsNorm
from jetfire.kernels_triton.rmsnorm.portable import TritonRmsNorm

KERNELS = (GluonRmsNorm(), TritonRmsNorm())
