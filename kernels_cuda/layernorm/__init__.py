"""LayerNorm's gradient in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from pathlib import Path

from jetfire.kernels_cuda.cluster_norm import ClusterNorm


class ClusterLayerNorm(ClusterNorm):
    op = "layernorm"
    source = Path(__file__).parent / "cluster.cu"
    sums = ("dweight", "dbias")


KERNELS = (ClusterLayerNorm(),)
