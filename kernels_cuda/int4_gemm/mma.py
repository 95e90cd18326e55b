"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.int4_gemm.constants import problem_constants
from jetfire.ops.device import Device
from jetfire.ops.machine_code import Cubin
from jetfire.ops.op import Config, Kernel, Tensors, ceil_div

if TYPE_CHECKING:
    import torch

    from jetfire.ops.int4_gemm import Int4GemmProblem

SOURCE = Path(__file__).parent / "mma.cu"
TILE_BYTES = 128  # of K
ARGUMENT_BYTES = 96
RESERVED_BYTES = 1024  # of shared memory, by the system, in every block (CUDA 11 and later)


@dataclass(frozen=True)
class MmaConfig(Config):
    """How a block's tile is cut and fed.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps_m, warps_n: warps among which they are divided.
        stages: of 128 bytes of K in shared memory.
        blocks: that an SM is to hold: each has as many registers as that leaves.
        raster: rows of tiles that are walked column by column.
    """

    tile_m: int = 128
    tile_n: int = 128
    warps_m: int = 2
    warps_n: int = 4
    stages: int = 3
    blocks: int = 1
    raster: int = 8

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        return self.tile_m // self.warps_m

    @property
    def warp_n(self) -> int:
        return self.tile_n // self.warps_n

    @property
    def sums(self) -> int:
        """A thread's, in int32."""
        return self.warp_m * self.warp_n // 32


@dataclass(frozen=True)
class Access:
    """What alignment leaves open.

    Attributes:
        copy_bytes: that one copy of A or B moves: 16, 8, 4, or 1 for any alignment.
        out: C is written in 16 bytes.
    """

    copy_bytes: int = 16
    out: bool = True

    @classmethod
    def of(cls, inputs: Tensors, outputs: Tensors) -> Access:
        def aligned(x: torch.Tensor, size: int) -> bool:
            return not (x.data_ptr() % size or x.stride(0) * x.itemsize % size)

        a, b = inputs["a"], inputs["b"]
        copy_bytes = next(s for s in (16, 8, 4, 1) if aligned(a, s) and aligned(b, s))
        return cls(copy_bytes, aligned(outputs["c"], 16))

    @classmethod
    def of_contiguous(cls, problem: Int4GemmProblem) -> Access:
        """What contiguous tensors have, each from a multiple of 16 on."""
        copy_bytes = next(size for size in (16, 8, 4, 1) if problem.row_bytes % size == 0)
        return cls(copy_bytes, problem.n * driver.ELEMENT_BYTES[problem.out] % 16 == 0)


ALIGNED = Access()


def shared_bytes(problem: Int4GemmProblem, config: MmaConfig) -> int:
    """Shared memory of a block; the source asserts that it counts the same."""
    staging = 16 * config.warp_n * driver.ELEMENT_BYTES[problem.out]
    ring = config.stages * (config.tile_m + config.tile_n) * TILE_BYTES
    return max(ring, config.warps * staging)


def config_header(problem: Int4GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> str:
    """The kernel's constants."""
    constants: dict[str, bool | int] = {
        **problem_constants(problem),
        "NIBBLES": problem.operands == "packed",
        "SHIFTED": problem.shifted,
        "COPY_BYTES": access.copy_bytes,
        "VECTOR_OUT": access.out,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "STAGES": config.stages,
        # Bytes that lie anywhere take registers to put in place.
        "MIN_BLOCKS": config.blocks if access.copy_bytes > 1 else 1,
        "RASTER": config.raster,
        "EXPECTED_SHARED_BYTES": shared_bytes(problem, config),
    }
    return header(constants)


def cubin(
    problem: Int4GemmProblem,
    config: MmaConfig,
    capability: tuple[int, int],
    access: Access = ALIGNED,
) -> bytes:
    """The machine code that a launch of this problem and config runs."""
    major, minor = capability
    return compile_cubin(SOURCE, config_header(problem, config, access), f"sm_{major}{minor}")


@lru_cache(maxsize=1024)
def _loaded(header: str, architecture: str, shared: int, device: int) -> driver.Function:
    code = compile_cubin(SOURCE, header, architecture)
    return driver.Function(code, "int4_gemm", device, shared)


@lru_cache(maxsize=4096)
def _function(
    problem: Int4GemmProblem, config: MmaConfig, access: Access, device: Device
) -> driver.Function:
    """One for all shapes that have the same code."""
    assert device.capability is not None
    major, minor = device.capability
    return _loaded(
        config_header(problem, config, access),
        f"sm_{major}{minor}",
        shared_bytes(problem, config),
        device.index,
    )


SPACE: dict[str, Sequence[Any]] = {
    "tile_m": (32, 64, 128, 256),
    "tile_n": (32, 64, 128, 256),
    "warps_m": (1, 2, 4),
    "warps_n": (1, 2, 4),
    "stages": (2, 3, 4, 5, 6),
    "blocks": (1, 2, 3),
    "raster": (1, 2, 4, 8, 16, 32),
}

# Beside its sums and fragments, what a thread needs so that nothing spills: of all configs audited
# on sm_80 and sm_90, the most that one spilled with was 40.
OTHER_REGISTERS = 41


def registers(config: MmaConfig) -> int:
    """What a thread may have, so that an SM's 65536 hold as many blocks as are wanted."""
    return min(255, 65536 // (32 * config.warps * config.blocks) // 8 * 8)


def held_registers(config: MmaConfig) -> int:
    """Sums, and the fragments of 32 bytes of K."""
    return config.sums + (config.warp_m + config.warp_n) // 4


class MmaInt4Gemm(Kernel):
    op = "int4_gemm"
    name = "mma"
    Config = MmaConfig

    def legal(self, problem: Int4GemmProblem, config: MmaConfig, device: Device) -> str | None:
        if device.kind != "cuda" or device.capability is None or device.capability < (8, 0):
            return "needs a GPU of sm_80 or later: it is written in mma.sync and cp.async"
        if (reason := driver.missing()) is not None:
            return reason
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        if reason := _misfit(config):
            return reason
        needed = shared_bytes(problem, config)
        needed += (config.blocks - 1) * (needed + RESERVED_BYTES)
        if needed > device.shared_bytes:
            return (
                f"{needed} bytes of shared memory for blocks={config.blocks}: {device.label} has "
                f"{device.shared_bytes}"
            )
        if ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n) >= 2**30:
            return "more than 2^30 tiles"
        return None

    def default(self, problem: Int4GemmProblem, device: Device) -> MmaConfig:
        """The largest tile that leaves no multiprocessor without work.

        128×256 where shared memory holds three stages of it: on sm_80, which multiplies twice as
        fast as sm_86 and sm_89, a warp's 64×64 reads 4 KB of shared memory for 64 cycles of
        products, where 64×32 reads 3 KB for 32.
        """
        for config in (MmaConfig(tile_n=256), MmaConfig()):
            tiles = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
            if tiles >= device.sms and self.legal(problem, config, device) is None:
                return config
        return MmaConfig(64, 64, 2, 2, stages=4)

    def space(self, problem: Int4GemmProblem, device: Device) -> dict[str, Sequence[Any]]:
        return dict(SPACE)

    def cubins(
        self, problem: Int4GemmProblem, config: MmaConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        access = Access.of_contiguous(problem)
        code = cubin(problem, config, capability, access)
        return [Cubin("int4_gemm", code, shared_bytes(problem, config), config.warps)]

    def launch(
        self, problem: Int4GemmProblem, config: MmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        a, b = inputs["a"], inputs["b"]
        function = _function(problem, config, Access.of(inputs, outputs), Device.of(a))
        address = driver.address
        content = struct.pack(
            "<2Q2q6Q3i", address(a), address(b), a.stride(0), b.stride(0),
            address(inputs["a_scale"]), address(inputs["b_scale"]), address(inputs.get("bias")),
            address(inputs.get("weight")), address(inputs.get("counts")), address(outputs["c"]),
            problem.m, problem.n, problem.row_bytes,
        )  # fmt: skip
        blocks = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        argument = driver.struct_argument(content, ARGUMENT_BYTES)
        function(blocks, 32 * config.warps, (argument,))


def _misfit(config: MmaConfig) -> str | None:
    """Why the tile does not suit its warps."""
    if config.warps < 4:
        return f"{config.warps} warps: expected at least 4, one for each scheduler"
    for name, size, share in (
        ("tile_m", config.tile_m, config.warp_m),
        ("tile_n", config.tile_n, config.warp_n),
    ):
        if not 16 <= share <= 64:
            return f"{name}={size}: {share} a warp, expected 16 to 64"
        if size < 4 * config.warps:
            return f"{name}={size}: expected at least 4 rows a warp to fetch"
    needed = held_registers(config) + OTHER_REGISTERS
    if needed > (limit := registers(config)):
        return f"needs {needed} registers a thread: blocks={config.blocks} of them leave {limit}"
    return None
