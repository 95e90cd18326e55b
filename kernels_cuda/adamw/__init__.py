"""AdamW in CUDA C++: what cluster.cu adds to adamw_cluster.cuh.

Triton's kernel cuts a tile of 128×128 into four slices, and the last program of a tile reads its
new weights again; here nothing is read twice. On an H100, with codes in blocks of 128, 768×768
takes 9.3 µs where Triton's kernel takes 12.9, and 3072×768 27.9 where it takes 31.6; of 8192×16384
both take 1.43 ms, 94% of a copy's bandwidth. In blocks of 32 and 64, which a slice holds whole,
Triton's kernel is as fast, or up to 7% faster.

Instructions issued per element to codes both ways in blocks of 128, as compiled for sm_90: 45, or
54 with a grad_scale, with what is done once per thread. An H200 issues those of 8192×16384 in 0.20
ms; its memory takes 0.94 for the 30 bytes of each element.
"""

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
        # What shared memory leaves room for has as many: no block is left out for want of them.
        return 80 if config.rows == 4 else 160


KERNELS = (AdamwCluster(),)
