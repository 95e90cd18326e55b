"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors
from jetfire.kernels_cuda import driver, mma_tiles
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.int4_gemm.constants import problem_constants
from jetfire.kernels_cuda.mma_tiles import TileAccess, TileConfig, aligned, copy_bytes, places

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

SOURCE = Path(__file__).parent / "mma.cu"
ARGUMENT_BYTES = 96


class MmaConfig(TileConfig):
    """Choices of how a block's tile is cut and fed."""


class Access(TileAccess):
    """Choices that the tensors' alignment decides."""

    @classmethod
    def of(cls, inputs: Tensors, outputs: Tensors) -> Access:
        operands = copy_bytes(*places(inputs["a"]), *places(inputs["b"]))
        return cls(operands, aligned(outputs["c"]))

    @classmethod
    def of_contiguous(cls, problem: Int4GemmProblem) -> Access:
        """Return the access of contiguous tensors, each from a multiple of 16 bytes on."""
        row = problem.n * driver.ELEMENT_BYTES[problem.out]
        return cls(copy_bytes(problem.row_bytes), row % 16 == 0)


ALIGNED = Access()


def shared_bytes(problem: Int4GemmProblem, config: MmaConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    staging = 16 * config.warp_n * driver.ELEMENT_BYTES[problem.out]
    return max(config.ring_bytes, config.warps * staging)


def config_header(problem: Int4GemmProblem, config: MmaConfig, access: Access = ALIGNED) -> str:
    """Write the kernel's constants as a header."""
    constants: dict[str, bool | int] = {
        **problem_constants(problem),
        "NIBBLES": problem.operands == "packed",
        "SHIFTED": problem.shifted,
        **mma_tiles.tile_constants(config, access),
        "EXPECTED_SHARED_BYTES": shared_bytes(problem, config),
    }
    return header(constants)


def cubin(
    problem: Int4GemmProblem,
    config: MmaConfig,
    capability: tuple[int, int],
    access: Access = ALIGNED,
) -> bytes:
    """Return the machine code that a launch of this problem and config runs."""
    return mma_tiles.compiled(SOURCE, config_header(problem, config, access), capability)


@lru_cache(maxsize=4096)
def _function(
    problem: Int4GemmProblem, config: MmaConfig, access: Access, device: Device
) -> driver.Function:
    header = config_header(problem, config, access)
    return mma_tiles.loaded(SOURCE, "int4_gemm", header, shared_bytes(problem, config), device)


# Beside its sums and fragments, what a thread needs so that nothing spills: of all configs audited
# on sm_80 and sm_90, the most that one spilled with was 40.
OTHER_REGISTERS = 41


def held_registers(config: MmaConfig) -> int:
    """Count a thread's sums and its fragments of 32 bytes of K."""
    return config.sums + (config.warp_m + config.warp_n) // 4


class MmaInt4Gemm(Kernel):
    op = "int4_gemm"
    name = "mma"
    Config = MmaConfig

    def legal(self, problem: Int4GemmProblem, config: MmaConfig, device: Device) -> str | None:
        return (
            mma_tiles.unsupported(device)
            or mma_tiles.outside(config, mma_tiles.SPACE)
            or mma_tiles.misfit(config)
            or mma_tiles.spilling(config, held_registers(config) + OTHER_REGISTERS)
            or mma_tiles.too_large(
                problem.m, problem.n, config, shared_bytes(problem, config), device
            )
        )

    def default(self, problem: Int4GemmProblem, device: Device) -> MmaConfig:
        """Return the largest tile that leaves no multiprocessor without work.

        It is 128×256 where shared memory holds three stages of it: on sm_80, which multiplies twice
        as fast as sm_86 and sm_89, a warp's 64×64 reads 4 KB of shared memory for 64 cycles of
        products, where 64×32 reads 3 KB for 32.
        """
        for config in (MmaConfig(tile_n=256), MmaConfig()):
            tiles = config.tiles(problem.m, problem.n)
            if tiles >= device.sms and self.legal(problem, config, device) is None:
                return config
        return MmaConfig(64, 64, 2, 2, stages=4)

    def space(self, problem: Int4GemmProblem, device: Device) -> dict[str, Sequence[Any]]:
        return dict(mma_tiles.SPACE)

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
            "<2Q2q6Q3i",
            address(a),
            address(b),
            a.stride(0),
            b.stride(0),
            address(inputs["a_scale"]),
            address(inputs["b_scale"]),
            address(inputs.get("bias")),
            address(inputs.get("weight")),
            address(inputs.get("counts")),
            address(outputs["c"]),
            problem.m,
            problem.n,
            problem.row_bytes,
        )
        argument = driver.struct_argument(content, ARGUMENT_BYTES)
        function(config.tiles(problem.m, problem.n), 32 * config.warps, (argument,))
