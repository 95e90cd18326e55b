"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver, mma_tiles
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.gemm.constants import problem_constants
from jetfire.kernels_cuda.mma_tiles import TileAccess, TileConfig, aligned, copy_bytes, places

if TYPE_CHECKING:
    import torch

    from jetfire.ops.gemm import GemmProblem

SOURCE = Path(__file__).parent / "mma.cu"
ARGUMENT_BYTES = 136


@dataclass(frozen=True)
class MmaConfig(TileConfig):
    """Choices of how a block's tile is cut and fed, and its sums promoted.

    Attributes:
        promotion: how a sum becomes a float, exactly: by a conversion, or ``biased`` so that a
            subtraction does.
    """

    promotion: Literal["converted", "biased"] = "converted"


@dataclass(frozen=True)
class Access(TileAccess):
    """Choices that the tensors' alignment decides.

    Attributes:
        qt: the transposed codes are written in 16 bytes, as (q or c) is where ``out`` says so.
    """

    qt: bool = True

    @classmethod
    def of(cls, inputs: Tensors, outputs: Tensors) -> Access:
        return cls(
            copy_bytes(*places(inputs["a"]), *places(inputs["b"])),
            aligned(outputs.get("c", outputs.get("q"))),
            aligned(outputs.get("qt")),
        )

    @classmethod
    def of_contiguous(cls, problem: GemmProblem) -> Access:
        """Return the access of contiguous tensors, each from a multiple of 16 bytes on."""
        row = problem.n * driver.ELEMENT_BYTES[problem.out]
        return cls(copy_bytes(problem.k), row % 16 == 0, problem.m % 16 == 0)


ALIGNED = Access()


def shared_bytes(problem: GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    element = driver.ELEMENT_BYTES[problem.out]
    staging = 16 * config.warp_n * element if access.out else 0
    if problem.layout != "q" and access.qt:
        staging += config.warp_m * config.warp_n
    down, across = (max(t // problem.block, 1) for t in (config.tile_m, config.tile_n))
    scales = config.stages * (mma_tiles.TILE_BYTES // problem.block) * (down + across) * 4
    amaxes = 0
    if problem.out == "int8":
        sizes = (config.tile_m, config.tile_n)
        amaxes = 4 * math.prod(max(size // problem.out_block, 1) for size in sizes)
    return max(config.ring_bytes, config.warps * staging) + scales + amaxes


def config_header(problem: GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> str:
    """Write the kernel's constants as a header."""
    constants: dict[str, bool | int] = {
        **problem_constants(problem),
        **mma_tiles.tile_constants(config, access),
        "VECTOR_QT": problem.layout != "q" and access.qt,
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
    """Return the machine code that a launch of this problem and config runs."""
    return mma_tiles.compiled(SOURCE, config_header(problem, config, access), capability)


@lru_cache(maxsize=4096)
def _function(
    problem: GemmProblem, config: MmaConfig, access: Access, device: Device
) -> driver.Function:
    header = config_header(problem, config, access)
    return mma_tiles.loaded(SOURCE, "gemm", header, shared_bytes(problem, config, access), device)


SPACE: dict[str, Sequence[Any]] = {**mma_tiles.SPACE, "promotion": ("converted", "biased")}


# With 128 some blocks and outputs spill three to twenty registers on one architecture or another.
MOST_SUMS = 64
# Beside its sums and a block of K's fragments, what a thread needs so that nothing spills: of all
# configs audited on sm_80, sm_89 and sm_90, the most that one spilled with was 56.
OTHER_REGISTERS = 57


def held_registers(problem: GemmProblem, config: MmaConfig) -> int:
    """Count a thread's sums and its fragments of one block of K: all of B, sixteen rows of A."""
    return config.sums + config.warp_n * problem.block // 128 + problem.block // 8


class MmaGemm(Kernel):
    op = "gemm"
    name = "mma"
    Config = MmaConfig

    def legal(self, problem: GemmProblem, config: MmaConfig, device: Device) -> str | None:
        return (
            mma_tiles.unsupported(device)
            or mma_tiles.outside(config, SPACE)
            or mma_tiles.misfit(config)
            or _misfit(problem, config)
            or mma_tiles.too_large(
                problem.m, problem.n, config, shared_bytes(problem, config), device
            )
        )

    def default(self, problem: GemmProblem, device: Device) -> MmaConfig:
        """Return large tiles, or small ones where those would leave SMs without work."""
        tiles = ceil_div(problem.m, 128) * ceil_div(problem.n, 128)
        small = tiles < device.sms and not (problem.out == "int8" and problem.out_block == 128)
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
            "<6Q2q7Q3i",
            address(a),
            address(b),
            _end(a),
            _end(b),
            address(inputs["a_scale"]),
            address(inputs["b_scale"]),
            a.stride(0),
            b.stride(0),
            address(outputs.get("c")),
            address(inputs.get("bias")),
            address(outputs.get("q")),
            address(outputs.get("scale")),
            address(outputs.get("qt")),
            address(outputs.get("scale_t")),
            address(inputs.get("seed")),
            problem.m,
            problem.n,
            problem.k,
        )
        argument = driver.struct_argument(content, ARGUMENT_BYTES)
        function(config.tiles(problem.m, problem.n), 32 * config.warps, (argument,))


def _end(x: torch.Tensor) -> int:
    """Return the address after a tensor's last byte."""
    return x.data_ptr() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]


def _misfit(problem: GemmProblem, config: MmaConfig) -> str | None:
    """Return why the tile does not suit the problem's blocks, or a thread's registers its sums."""
    for name, size in (("tile_m", config.tile_m), ("tile_n", config.tile_n)):
        if problem.out == "int8" and size % (block := problem.out_block):
            return f"{name}={size}: expected a multiple of {block} to requantise its blocks"
    if config.sums > MOST_SUMS:
        return f"{config.sums} sums per thread: expected at most {MOST_SUMS}"
    return mma_tiles.spilling(config, held_registers(problem, config) + OTHER_REGISTERS)
