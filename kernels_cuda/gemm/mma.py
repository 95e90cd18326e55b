"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.gemm.constants import problem_constants
from jetfire.ops.device import Device
from jetfire.ops.machine_code import Cubin
from jetfire.ops.op import Config, Kernel, Tensors, ceil_div

if TYPE_CHECKING:
    import torch

    from jetfire.ops.gemm import GemmProblem

SOURCE = Path(__file__).parent / "mma.cu"
TILE_K = 128
ARGUMENT_BYTES = 136
RESERVED_BYTES = 1024  # of shared memory, by the system, in every block (CUDA 11 and later)


@dataclass(frozen=True)
class MmaConfig(Config):
    """How a block's tile is cut and fed.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        warps_m, warps_n: warps among which they are divided.
        stages: of 128 of K in shared memory.
        blocks: that an SM is to hold: each has as many registers as that leaves.
        raster: rows of tiles that are walked column by column.
        promotion: how a sum becomes a float, exactly: by a conversion, or ``biased`` so that a
            subtraction does.
    """

    tile_m: int = 128
    tile_n: int = 128
    warps_m: int = 2
    warps_n: int = 4
    stages: int = 3
    blocks: int = 1
    raster: int = 8
    promotion: Literal["converted", "biased"] = "converted"

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
        """A thread's, in fp32."""
        return self.warp_m * self.warp_n // 32


@dataclass(frozen=True)
class Access:
    """What alignment leaves open.

    Attributes:
        copy_bytes: that one copy of A or B moves: 16, 8, 4, or 1 for any alignment.
        out: (q or c) is written in 16 bytes.
        turned: qt is.
    """

    copy_bytes: int = 16
    out: bool = True
    turned: bool = True

    @classmethod
    def of(cls, inputs: Tensors, outputs: Tensors) -> Access:
        def aligned(x: torch.Tensor, size: int) -> bool:
            return not (x.data_ptr() % size or x.stride(0) * x.itemsize % size)

        a, b = inputs["a"], inputs["b"]
        copy_bytes = next(s for s in (16, 8, 4, 1) if aligned(a, s) and aligned(b, s))
        main, turned = outputs.get("c", outputs.get("q")), outputs.get("qt")
        return cls(
            copy_bytes,
            main is not None and aligned(main, 16),
            turned is not None and aligned(turned, 16),
        )

    @classmethod
    def of_contiguous(cls, problem: GemmProblem) -> Access:
        """What contiguous tensors have, each from a multiple of 16 on."""
        copy_bytes = next(size for size in (16, 8, 4, 1) if problem.k % size == 0)
        row = problem.n * driver.ELEMENT_BYTES[problem.out]
        return cls(copy_bytes, row % 16 == 0, problem.m % 16 == 0)


ALIGNED = Access()


def shared_bytes(problem: GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> int:
    """Shared memory of a block; the source asserts that it counts the same."""
    element = driver.ELEMENT_BYTES[problem.out]
    staging = 16 * config.warp_n * element if access.out else 0
    if problem.layout != "q" and access.turned:
        staging += config.warp_m * config.warp_n
    ring = config.stages * (config.tile_m + config.tile_n) * TILE_K
    down, across = (max(t // problem.block, 1) for t in (config.tile_m, config.tile_n))
    scales = config.stages * (TILE_K // problem.block) * (down + across) * 4
    amaxes = 4 * down * across if problem.out == "int8" else 0
    return max(ring, config.warps * staging) + scales + amaxes


def config_header(problem: GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> str:
    """The kernel's constants."""
    constants: dict[str, bool | int] = {
        **problem_constants(problem),
        "COPY_BYTES": access.copy_bytes,
        "VECTOR_OUT": access.out,
        "VECTOR_TURNED": problem.layout != "q" and access.turned,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n,
        "STAGES": config.stages,
        # Bytes that lie anywhere take registers to put in place.
        "MIN_BLOCKS": config.blocks if access.copy_bytes > 1 else 1,
        "RASTER": config.raster,
        "BIASED": config.promotion == "biased",
        "EXPECTED_SHARED_BYTES": shared_bytes(problem, config, access),
    }
    return header(constants)


def cubin(
    problem: GemmProblem,
    config: MmaConfig,
    capability: tuple[int, int],
    access: Access = ALIGNED,
) -> bytes:
    """The machine code that a launch of this problem and config runs."""
    major, minor = capability
    return compile_cubin(SOURCE, config_header(problem, config, access), f"sm_{major}{minor}")


@lru_cache(maxsize=1024)
def _loaded(header: str, architecture: str, shared: int, device: int) -> driver.Function:
    return driver.Function(compile_cubin(SOURCE, header, architecture), "gemm", device, shared)


@lru_cache(maxsize=4096)
def _function(
    problem: GemmProblem, config: MmaConfig, access: Access, device: Device
) -> driver.Function:
    """One for all shapes that have the same code."""
    assert device.capability is not None
    major, minor = device.capability
    return _loaded(
        config_header(problem, config, access),
        f"sm_{major}{minor}",
        shared_bytes(problem, config, access),
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
    "promotion": ("converted", "biased"),
}


# With 128 some blocks and outputs spill three to twenty registers on one architecture or another.
MOST_SUMS = 64
# Beside its sums and a block of K's fragments, what a thread needs so that nothing spills: of all
# configs audited on sm_80, sm_89 and sm_90, the most that one spilled with was 56.
OTHER_REGISTERS = 57


def registers(config: MmaConfig) -> int:
    """What a thread may have, so that an SM's 65536 hold as many blocks as are wanted."""
    return min(255, 65536 // (32 * config.warps * config.blocks) // 8 * 8)


def held_registers(problem: GemmProblem, config: MmaConfig) -> int:
    """Sums, and the fragments of one block of K: of B all, of A sixteen rows."""
    return config.sums + config.warp_n * problem.block // 128 + problem.block // 8


class MmaGemm(Kernel):
    op = "gemm"
    name = "mma"
    Config = MmaConfig

    def legal(self, problem: GemmProblem, config: MmaConfig, device: Device) -> str | None:
        if device.kind != "cuda" or device.capability is None or device.capability < (8, 0):
            return "needs a GPU of sm_80 or later: it is written in mma.sync and cp.async"
        if (reason := driver.missing()) is not None:
            return reason
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        if reason := _misfit(problem, config):
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

    def default(self, problem: GemmProblem, device: Device) -> MmaConfig:
        """Large tiles, or small ones where large ones would leave multiprocessors without work."""
        tiles = ceil_div(problem.m, 128) * ceil_div(problem.n, 128)
        small = tiles < device.sms and not (problem.out == "int8" and problem.block == 128)
        return MmaConfig(64, 64, 2, 2, stages=4) if small else MmaConfig()

    def space(self, problem: GemmProblem, device: Device) -> dict[str, Sequence[Any]]:
        return dict(SPACE)

    def cubins(
        self, problem: GemmProblem, config: MmaConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        access = Access.of_contiguous(problem)
        code = cubin(problem, config, capability, access)
        return [Cubin("gemm", code, shared_bytes(problem, config, access), config.warps)]

    def launch(
        self, problem: GemmProblem, config: MmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        a, b = inputs["a"], inputs["b"]
        function = _function(problem, config, Access.of(inputs, outputs), Device.of(a))
        address = driver.address
        content = struct.pack(
            "<6Q2q7Q3i", address(a), address(b), _end(a), _end(b), address(inputs["a_scale"]),
            address(inputs["b_scale"]), a.stride(0), b.stride(0),
            address(outputs.get("c")), address(inputs.get("bias")), address(outputs.get("q")),
            address(outputs.get("scale")), address(outputs.get("qt")),
            address(outputs.get("scale_t")), address(inputs.get("seed")),
            problem.m, problem.n, problem.k,
        )  # fmt: skip
        blocks = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        argument = driver.struct_argument(content, ARGUMENT_BYTES)
        function(blocks, 32 * config.warps, (argument,))


def _end(x: torch.Tensor) -> int:
    """The address after its last byte."""
    return x.data_ptr() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]


def _misfit(problem: GemmProblem, config: MmaConfig) -> str | None:
    """Why the tile does not suit its warps or the problem's blocks."""
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
        if problem.out == "int8" and size % problem.block:
            return f"{name}={size}: expected a multiple of {problem.block} to requantise its blocks"
    if config.sums > MOST_SUMS:
        return f"{config.sums} sums a thread: expected at most {MOST_SUMS}"
    needed = held_registers(problem, config) + OTHER_REGISTERS
    if needed > (limit := registers(config)):
        return f"needs {needed} registers a thread: blocks={config.blocks} of them leave {limit}"
    return None
