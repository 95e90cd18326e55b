"""LayerNorm's gradient in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetfire.core.device import Device
from jetfire.kernels_cuda.cluster_norm import ClusterConfig, ClusterNorm


class ClusterLayerNorm(ClusterNorm):
    op = "layernorm"
    source = Path(__file__).parent / "cluster.cu"
    sums = ("dweight", "dbias")

    def legal(self, problem: Any, config: ClusterConfig, device: Device) -> str | None:
        if problem.residual:
            return "residual=true: expected false"
        return super().legal(problem, config, device)


KERNELS = (ClusterLayerNorm(),)
