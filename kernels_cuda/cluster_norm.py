"""The norms' gradient from one reading: configuration, legality and launch of cluster_norm.cuh.

LayerNorm's, of 8192×4096 codes, stochastic, layout q, issues 34 instructions per element, which are
38 µs of an H200's issue slots at 1.75 GHz; its 101 MB take 24 µs. The three launches of the Gluon
kernel issue 35, read x and dy twice and take 79 µs; this one takes 62 (RMSNorm's: 70 and 57), at
8192×1024 19.5 after tuning, where Gluon's takes 26.5. It has no shipped profiles yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jetfire.core.device import Device
from jetfire.core.kernel import Config, Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.driver import address

if TYPE_CHECKING:
    import torch

COLUMN_SUMS = Path(__file__).parent / "norm_column_sums.cu"
SIDE = 32  # of dx's blocks, and rows of a tile
COLUMNS_OF_A_WARP = 64
# Registers that a thread needs so that nothing spills, as audited on sm_90.
REGISTERS = 128


@dataclass(frozen=True)
class ClusterConfig(Config):
    """Choices of how rows are divided among blocks, which have 64 columns per warp.

    Attributes:
        columns: columns of a block; cluster: blocks that share rows.
        stages: tiles in shared memory, of which one is being read.
        resident: blocks that an SM is to hold.
    """

    columns: int = 512
    cluster: int = 8
    stages: int = 2
    resident: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.columns // COLUMNS_OF_A_WARP


SPACE: dict[str, Sequence[Any]] = {
    "columns": (128, 256, 512, 1024),
    "cluster": (1, 2, 4, 8),
    "stages": (2, 3, 4),
    "resident": (1, 2, 3, 4, 6, 8),
}


def shared_bytes(config: ClusterConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    tile = 2 * (SIDE * config.columns + 4 * SIDE + 4 * config.columns // SIDE)
    warps = config.columns // COLUMNS_OF_A_WARP
    sums = 8 * ((SIDE + 1) * warps + SIDE * 2 * config.cluster)
    return config.stages * tile + 4 * config.columns + sums + 16


def config_header(problem: Any, config: ClusterConfig, access: int) -> str:
    """Write the kernel's constants as a header."""
    constants: dict[str, bool | int] = {
        "COLUMNS": config.columns,
        "CLUSTER": config.cluster,
        "STAGES": config.stages,
        "RESIDENT": config.resident,
        "SHARED_BYTES": shared_bytes(config),
        "BLOCK": problem.block,
        "STOCHASTIC": problem.rounding == "stochastic",
        "WRITES_Q": problem.layout != "qt",
        "WRITES_QT": problem.layout != "q",
        "WHOLE_COLUMNS": problem.n % SIDE == 0,
        "ACCESS": access,
        "Q_ACCESS": 1 if problem.n % 8 else 8,
        "QT_ACCESS": 1 if problem.m % 4 else 4,
    }
    return header(constants)


def _access(n: int, *places: int) -> int:
    """Return the bytes per access to codes: 16 where rows and all places are in such units."""
    return 1 if any(place % 16 for place in (n, *places)) else 16


def _compiled(source: Path, text: str, capability: tuple[int, int]) -> bytes:
    major, minor = capability
    return compile_cubin(source, text, f"sm_{major}{minor}")


@cache
def _function(source: Path, text: str, device: Device, shared: int) -> driver.Function:
    """Load a kernel with this `config.cuh`; it is kept for ever, since graphs hold it."""
    assert device.capability is not None
    code = _compiled(source, text, device.capability)
    return driver.Function(code, source.stem, device.index, shared)


@cache
def _clusters(function: driver.Function, config: ClusterConfig) -> int:
    """Return how many clusters run at once."""
    return function.resident_clusters(config.cluster, config.threads)


class ClusterNorm(Kernel):
    """A norm's gradient to blocks of 32, for clusters whose blocks exchange sums of rows.

    Attributes:
        source: the op's; sums: its outputs that are sums over rows.
    """

    name = "cluster"
    Config = ClusterConfig
    candidate = True
    source: ClassVar[Path]
    sums: ClassVar[tuple[str, ...]]

    def legal(self, problem: Any, config: ClusterConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (9, 0):
            return "needs sm_90 or newer: it is written for clusters of blocks"
        if (reason := driver.missing()) is not None:
            return reason
        if problem.mode != "bwd":
            return "mode=fwd: expected bwd"
        if problem.out_block != SIDE:
            return f"out_block={problem.out_block}: expected {SIDE}, the rows that fit an SM"
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        if problem.n > config.cluster * config.columns:
            return f"n={problem.n}: expected at most cluster·columns"
        if problem.m > 2**30:
            return f"m={problem.m}: expected at most 2^30"
        if config.resident * config.threads * REGISTERS > 65536:
            return f"resident={config.resident}: {REGISTERS} registers per thread do not fit"
        # The device keeps 1 KiB per block for itself.
        if config.resident * (shared_bytes(config) + 1024) > device.shared_bytes + 1024:
            return f"resident={config.resident} stages={config.stages}: too much shared memory"
        return None

    def default(self, problem: Any, device: Device) -> ClusterConfig:
        """Return the fewest columns in the fewest blocks, two tiles each; 16 warps per SM."""
        for columns, cluster in ((256, 1), (256, 2), (256, 4), (512, 4), (512, 8), (1024, 8)):
            if problem.n <= columns * cluster:
                break
        return ClusterConfig(columns, cluster, 2, 1024 // columns)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def cubin(
        self, problem: Any, config: ClusterConfig, capability: tuple[int, int], access: int
    ) -> Cubin:
        """Return the machine code of the kernel itself."""
        code = _compiled(self.source, config_header(problem, config, access), capability)
        return Cubin(self.source.stem, code, shared_bytes(config), config.threads // 32)

    def cubins(
        self, problem: Any, config: ClusterConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        sums = _compiled(COLUMN_SUMS, header({}), capability)
        return [
            self.cubin(problem, config, capability, _access(problem.n)),
            Cubin(COLUMN_SUMS.stem, sums, 1024, 8),
        ]

    def launch(
        self, problem: Any, config: ClusterConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        import torch

        x, dy = inputs["x"], inputs["dy"]
        device = Device.of(x)
        places = x.data_ptr(), x.stride(0), dy.data_ptr(), dy.stride(0)
        text = config_header(problem, config, _access(problem.n, *places))
        function = _function(self.source, text, device, shared_bytes(config))
        clusters = min(ceil_div(problem.m, SIDE), _clusters(function, config))
        shape = len(self.sums), clusters, problem.n
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        content = arguments(problem, inputs, outputs, parts)
        argument = driver.struct_argument(content, len(content))
        function(clusters * config.cluster, config.threads, (argument,))
        _function(COLUMN_SUMS, header({}), device, 0)(
            len(self.sums) * ceil_div(problem.n, 32),
            256,
            (
                np.uint64(address(parts)),
                np.uint64(address(outputs["dweight"])),
                np.uint64(address(outputs.get("dbias"))),
                np.int32(clusters),
                np.int32(problem.n),
            ),
        )


def arguments(problem: Any, inputs: Tensors, outputs: Tensors, parts: torch.Tensor) -> bytes:
    """Make the struct of cluster_norm.cuh."""
    given = ("x", "x_scale", "dy", "dy_scale", "weight", "mean", "rstd", "seed")
    written = ("q", "scale", "qt", "scale_t")
    return struct.pack(
        "<13Q4q2i",
        *(address(inputs.get(name)) for name in given),
        *(address(outputs.get(name)) for name in written),
        address(parts),
        *(inputs[name].stride(0) for name in ("x", "x_scale", "dy", "dy_scale")),
        problem.m,
        problem.n,
    )
