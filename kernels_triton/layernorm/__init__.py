"""LayerNorm on quantised tensors, forward and backward."""

from __future__ import annotations

from jetfire.kernels_triton.layernorm.kernel import GluonLayerNorm
from jetfire.kernels_triton.layernorm.portable import TritonLayerNorm

KERNELS = (GluonLayerNorm(), TritonLayerNorm())
