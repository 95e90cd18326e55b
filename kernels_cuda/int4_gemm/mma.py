"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.int4_gemm.constants import problem_constants
from jetfire.kernels_cuda.mma_tiles import Access, MmaKernel, TileConfig

if TYPE_CHECKING:
    from jetfire.ops.int4_gemm import Int4GemmProblem

# Beside its sums and fragments, what a thread needs so that nothing spills: of all configs audited
# on sm_80 and sm_90, the most that one spilled with was 40.
OTHER_REGISTERS = 41


class MmaConfig(TileConfig):
    """Choices of how a block's tile is cut and fed."""


def held_registers(config: MmaConfig) -> int:
    """Count a thread's sums and its fragments of 32 bytes of K."""
    return config.sums + (config.warp_m + config.warp_n) // 4


class MmaInt4Gemm(MmaKernel):
    op = "int4_gemm"
    Config = MmaConfig
    source = Path(__file__).parent / "mma.cu"

    def row_bytes(self, problem: Int4GemmProblem) -> int:
        return problem.row_bytes

    def shared_bytes(self, problem: Int4GemmProblem, config: MmaConfig, access: Access) -> int:
        staging = 16 * config.warp_n * driver.ELEMENT_BYTES[problem.out]
        amaxes = 0
        if problem.out == "int8":
            amaxes = config.tile_m * config.tile_n // problem.out_block**2
        return max(config.ring_bytes, config.warps * staging) + 4 * amaxes

    def needed_registers(self, problem: Int4GemmProblem, config: MmaConfig) -> int:
        return held_registers(config) + OTHER_REGISTERS

    def refused(self, problem: Int4GemmProblem, config: MmaConfig) -> str | None:
        for name, size in (("tile_m", config.tile_m), ("tile_n", config.tile_n)):
            if problem.out == "int8" and size % (block := problem.out_block):
                return f"{name}={size}: expected a multiple of {block} to write its blocks of codes"
        return None

    def constants(
        self, problem: Int4GemmProblem, config: MmaConfig, access: Access
    ) -> dict[str, bool | int]:
        return {
            **problem_constants(problem),
            "NIBBLES": problem.operands == "packed",
            "SHIFTED": problem.shifted,
        }

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
        small = not (problem.out == "int8" and problem.out_block == 128)
        return MmaConfig(64, 64, 2, 2, stages=4) if small else MmaConfig()

    def arguments(self, problem: Int4GemmProblem, inputs: Tensors, outputs: Tensors) -> bytes:
        a, b = inputs["a"], inputs["b"]
        names = ("a_scale", "b_scale", "bias", "weight", "counts")
        return struct.pack(
            "<2Q2q6Q3i4xQ",
            address(a),
            address(b),
            a.stride(0),
            b.stride(0),
            *(address(inputs.get(name)) for name in names),
            address(next(iter(outputs.values()))),
            problem.m,
            problem.n,
            problem.row_bytes,
            address(outputs.get("scale")),
        )
