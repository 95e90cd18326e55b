"""LayerNorm on quantised tensors, forward and backward."""

from __future__ import annotations

from jetfire.kernels_triton.layernorm.kernel import TritonLayerNorm

KERNELS = (TritonLayerNorm(),)
