"""AdamW in CUDA C++: what cluster.cu adds to adamw_cluster.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jetfire.kernels_cuda.adamw_cluster import ClusterConfig, StepCluster


class AdamwCluster(StepCluster):
    op = "adamw"
    source = Path(__file__).parent / "cluster.cu"
    moment = 4
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (4, 8, 16),
        "rows": (4, 8),
        "resident": (1, 2, 3),
    }

    def registers(self, problem: Any, config: ClusterConfig) -> int:
        return 80 if config.rows == 4 else 160


KERNELS = (AdamwCluster(),)
