"""LayerNorm's gradient in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from jetfire.kernels_cuda.layernorm.cluster import ClusterLayerNorm

KERNELS = (ClusterLayerNorm(),)
