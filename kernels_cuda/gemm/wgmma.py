"""The sm_90a kernel's configuration, legality and launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.gemm.noise import telescoped_noise
from jetfire.ops.device import Device
from jetfire.ops.machine_code import Cubin
from jetfire.ops.op import Config, Kernel, Tensors, ceil_div

if TYPE_CHECKING:
    import torch

    from jetfire.ops.gemm import GemmProblem

SOURCE = Path(__file__).parent / "wgmma.cu"
TILE_K = 128
OUTPUTS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3}
# Registers of a thread that multiplies and of one that feeds it, by warp groups: what 65536 of them
# give to all warps at launch, rounded down to eights, shared out anew.
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32), 4: (112, 32)}


@dataclass(frozen=True)
class WgmmaConfig(Config):
    """How a block's tile is cut and fed.

    Attributes:
        groups: warp groups that multiply, one below the other.
        rows: times 64, that each of them has of a tile of 64·rows·groups.
        tile_n: columns of a tile.
        stages: of 128 of K in shared memory.
        buffers: of 8 KiB a group, on their way out.
        cluster_m, cluster_n: blocks that fetch B, or A, together.
        raster: rows of (cluster) tiles that are walked column by column.
        schedule: of the promotion; ``exact`` rounds as the reference does.
    """

    groups: int = 3
    rows: int = 1
    tile_n: int = 128
    stages: int = 4
    buffers: int = 1
    cluster_m: int = 1
    cluster_n: int = 2
    raster: int = 8
    schedule: Literal["exact", "telescoped"] = "exact"

    @property
    def tile_m(self) -> int:
        return 64 * self.rows * self.groups

    @property
    def telescoped(self) -> bool:
        return self.schedule == "telescoped"


@dataclass(frozen=True)
class Path16:
    """Which ways to memory TMA's pitch of 16 bytes leaves open, for (q or c) and for qt."""

    out: bool
    turned: bool

    @classmethod
    def of(cls, problem: GemmProblem, outputs: Tensors) -> Path16:
        main, turned = outputs.get("c", outputs.get("q")), outputs.get("qt")

        def fits(x: torch.Tensor | None) -> bool:
            return x is not None and not (x.data_ptr() % 16 or x.stride(0) * x.itemsize % 16)

        return cls(fits(main), fits(turned))


def _wide_path(problem: GemmProblem) -> Path16:
    return Path16(True, True)


def factor_floats(problem: GemmProblem, config: WgmmaConfig) -> int:
    """Floats of a stage, as the source lays them out."""
    block, tile_n = problem.block, config.tile_n
    columns = next(c for c in (128, 64, 32) if c <= block and tile_n % c == 0)
    rows, factors = config.tile_m // min(block, 64), tile_n // columns
    pitch = ceil_div(factors, 4) * 4 if factors > 2 else factors
    return (128 // block + config.telescoped) * rows * pitch


def shared_bytes(problem: GemmProblem, config: WgmmaConfig) -> int:
    """Shared memory of a block; the source asserts that it counts the same."""
    turned = problem.layout != "q"
    staging = 64 * config.tile_n if turned and config.tile_n > 128 else 8192
    floats = factor_floats(problem, config)
    amax = 0
    if problem.out == "int8":
        amax = 8 * config.groups * config.rows * max(config.tile_n // problem.block, 1)
    return (
        config.stages * (config.tile_m + config.tile_n) * TILE_K
        + config.groups * config.buffers * staging
        + ceil_div(config.stages * floats, 4) * 16
        + ceil_div(amax, 2) * 8
        + 16 * config.stages
    )


def accumulators(config: WgmmaConfig) -> int:
    """Registers of a thread that hold sums, int32 and fp32."""
    products = config.rows if config.telescoped else 1
    return (config.rows + products) * config.tile_n // 2


def wgmma_wrapper(tile_n: int) -> str:
    """The s8 wgmma of 64×tile_n×32: its operand list is as long as tile_n/2."""
    count = tile_n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void wgmma(int (&d)[{count}], unsigned long long a,
                                      unsigned long long b, int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{tile_n}k32.s32.s8.s8 "
      "{{{registers}}}, %{count}, %{count + 1}, p;\\n}}"
      : {operands} : "l"(a), "l"(b), "r"(accumulate));
}}"""


def config_header(problem: GemmProblem, config: WgmmaConfig, path: Path16) -> str:
    """The kernel's constants."""
    consumer, producer = REGISTERS[config.groups]
    constants: dict[str, bool | int] = {
        "BLOCK": problem.block,
        "OUTPUT": OUTPUTS[problem.out],
        "BIAS": problem.bias,
        "ACCUMULATE": problem.accumulate,
        "STOCHASTIC": problem.rounding == "stochastic",
        "Q": problem.out == "int8" and problem.layout != "qt",
        "TURNED": problem.layout != "q",
        "TMA_OUT": path.out,
        "TMA_TURNED": path.turned,
        "GROUPS": config.groups,
        "ROWS": config.rows,
        "TILE_N": config.tile_n,
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "CLUSTER_M": config.cluster_m,
        "CLUSTER_N": config.cluster_n,
        "RASTER": config.raster,
        "TELESCOPED": config.telescoped,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "EXPECTED_SHARED_BYTES": shared_bytes(problem, config),
    }
    return header(constants, wgmma_wrapper(config.tile_n))


def cubin(problem: GemmProblem, config: WgmmaConfig, path: Path16 | None = None) -> bytes:
    """The machine code that a launch of this problem and config runs."""
    path = path or _wide_path(problem)
    return compile_cubin(SOURCE, config_header(problem, config, path), "sm_90a")


@lru_cache(maxsize=1024)
def _function(header_key: tuple[Any, ...], device: int) -> driver.Function:
    problem, config, path = header_key
    return driver.Function(
        cubin(problem, config, path), "gemm", device, shared_bytes(problem, config)
    )


SPACE: dict[str, Sequence[Any]] = {
    "groups": (1, 2, 3, 4),
    "rows": (1, 2),
    "tile_n": (32, 64, 96, 128, 160, 192, 256),
    "stages": (2, 3, 4, 5, 6, 7, 8),
    "buffers": (1, 2),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "raster": (1, 2, 4, 8, 16, 32),
    "schedule": ("exact", "telescoped"),
}
# Beside the sums, what a thread that multiplies needs, so that nothing spills.
OTHER_REGISTERS = 28


class WgmmaGemm(Kernel):
    op = "gemm"
    name = "wgmma"
    Config = WgmmaConfig

    def legal(self, problem: GemmProblem, config: WgmmaConfig, device: Device) -> str | None:
        if device.kind != "cuda" or device.capability != (9, 0):
            return "needs sm_90: it is written in its warp-group instructions"
        if (reason := driver.missing()) is not None:
            return reason
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        if reason := _misfit(problem, config):
            return reason
        limit = REGISTERS[config.groups][0] - OTHER_REGISTERS
        if accumulators(config) > limit:
            return (
                f"{accumulators(config)} sums a thread: {config.groups} groups have registers for "
                f"{limit}"
            )
        if (needed := shared_bytes(problem, config)) > device.shared_bytes:
            return f"{needed} bytes of shared memory: {device.label} has {device.shared_bytes}"
        if ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n) >= 2**30:
            return "more than 2^30 tiles"
        return None

    def default(self, problem: GemmProblem, device: Device) -> WgmmaConfig:
        return WgmmaConfig(schedule="exact" if problem.block == 128 else "telescoped")

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def noise(
        self, problem: GemmProblem, config: WgmmaConfig, inputs: Tensors
    ) -> torch.Tensor | None:
        return telescoped_noise(inputs, problem.block) if config.telescoped else None

    def cubins(
        self, problem: GemmProblem, config: WgmmaConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        warps = 4 * (config.groups + 1)
        return [Cubin("gemm", cubin(problem, config), shared_bytes(problem, config), warps)]

    def launch(
        self, problem: GemmProblem, config: WgmmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        a, b = inputs["a"], inputs["b"]
        index = a.device.index
        path = Path16.of(problem, outputs)
        function = _function((problem, config, path), index)
        tile_m, tile_n = config.tile_m, config.tile_n
        maps = (
            driver.tensor_map(a.data_ptr(), "int8", problem.m, problem.k, a.stride(0),
                              tile_m // config.cluster_n, TILE_K),
            driver.tensor_map(b.data_ptr(), "int8", problem.n, problem.k, b.stride(0),
                              tile_n // config.cluster_m, TILE_K),
            *_output_maps(problem, config, path, outputs),
        )  # fmt: skip
        address = driver.address
        content = struct.pack(
            "<128s128s128s128s9Q3i", *maps, address(inputs["a_scale"]), address(inputs["b_scale"]),
            address(outputs.get("c")), address(inputs.get("bias")), address(outputs.get("q")),
            address(outputs.get("scale")), address(outputs.get("qt")),
            address(outputs.get("scale_t")), address(inputs.get("seed")),
            problem.m, problem.n, problem.k,
        )  # fmt: skip
        cluster = config.cluster_m * config.cluster_n
        tiles = ceil_div(problem.m, tile_m * config.cluster_m) * ceil_div(
            problem.n, tile_n * config.cluster_n
        )
        blocks = min(tiles, Device.of(a).sms // cluster) * cluster
        function(blocks, 128 * (config.groups + 1), (driver.struct_argument(content, 640),))


def _misfit(problem: GemmProblem, config: WgmmaConfig) -> str | None:
    """Why the tile does not suit the problem's blocks or the cluster."""
    tile_m, tile_n, block = config.tile_m, config.tile_n, problem.block
    for name, size, share in (
        ("tile_m", tile_m, config.cluster_n),
        ("tile_n", tile_n, config.cluster_m),
    ):
        if size // share > 256 or size % (8 * share):
            return f"{name}={size}: expected at most 256 rows a block of the cluster, in eights"
        if problem.out == "int8" and size % block:
            return f"{name}={size}: expected a multiple of {block} to requantise blocks of it"
    if problem.out == "int8" and block == 128 and config.rows == 1 and config.groups % 2:
        return f"groups={config.groups}: expected an even number to requantise blocks of 128"
    if problem.layout != "q" and tile_n > 256:
        return f"tile_n={tile_n}: expected at most 256 to transpose"
    return None


def _output_maps(
    problem: GemmProblem, config: WgmmaConfig, path: Path16, outputs: Tensors
) -> tuple[bytes, bytes]:
    out = turned = driver.NO_MAP
    if path.out:
        element = driver.ELEMENT_BYTES[problem.out]
        width = next(w for w in (128, 64, 32) if config.tile_n * element % w == 0)
        main = outputs["q" if problem.out == "int8" else "c"]
        out = driver.tensor_map(
            main.data_ptr(), problem.out, problem.m, problem.n, main.stride(0) * element, 64,
            width // element,
        )  # fmt: skip
    if path.turned:
        qt = outputs["qt"]
        turned = driver.tensor_map(
            qt.data_ptr(), "int8", problem.n, problem.m, qt.stride(0), config.tile_n, 64
        )
    return out, turned
