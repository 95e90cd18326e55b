"""The mma.sync kernel's configuration, legality and launch, for sm_80 and later."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver, mma_tiles
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.gemm.constants import problem_constants
from jetfire.kernels_cuda.mma_tiles import Access, MmaKernel, TileConfig

if TYPE_CHECKING:
    import torch

    from jetfire.ops.gemm import GemmProblem

# With 128 some blocks and outputs spill three to twenty registers on one architecture or another.
MOST_SUMS = 64
# Beside its sums and a block of K's fragments, what a thread needs so that nothing spills: of all
# configs audited on sm_80, sm_89 and sm_90, the most that one spilled with was 56.
OTHER_REGISTERS = 57


@dataclass(frozen=True)
class MmaConfig(TileConfig):
    """Choices of how a block's tile is cut and fed, and its sums promoted.

    Attributes:
        promotion: how a sum becomes a float, exactly: by a conversion, or ``biased`` so that a
            subtraction does.
    """

    promotion: Literal["converted", "biased"] = "converted"


def held_registers(problem: GemmProblem, config: MmaConfig) -> int:
    """Count a thread's sums and its fragments of one block of K: all of B, sixteen rows of A."""
    return config.sums + config.warp_n * problem.block // 128 + problem.block // 8


class MmaGemm(MmaKernel):
    op = "gemm"
    Config = MmaConfig
    choices: ClassVar = {**MmaKernel.choices, "promotion": ("converted", "biased")}
    source = Path(__file__).parent / "mma.cu"

    def row_bytes(self, problem: GemmProblem) -> int:
        return problem.k

    def shared_bytes(self, problem: GemmProblem, config: MmaConfig, access: Access) -> int:
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

    def needed_registers(self, problem: GemmProblem, config: MmaConfig) -> int:
        return held_registers(problem, config) + OTHER_REGISTERS

    def constants(
        self, problem: GemmProblem, config: MmaConfig, access: Access
    ) -> dict[str, bool | int]:
        return {
            **problem_constants(problem),
            "VECTOR_QT": problem.layout != "q" and access.qt,
            "BIASED": config.promotion == "biased",
        }

    def refused(self, problem: GemmProblem, config: MmaConfig) -> str | None:
        for name, size in (("tile_m", config.tile_m), ("tile_n", config.tile_n)):
            if problem.out == "int8" and size % (block := problem.out_block):
                return f"{name}={size}: expected a multiple of {block} to requantise its blocks"
        if problem.squares and config.warp_n % 32:
            return f"{config.warp_n} columns per warp: expected a multiple of 32 to add up squares"
        if config.sums > MOST_SUMS:
            return f"{config.sums} sums per thread: expected at most {MOST_SUMS}"
        return None

    def default(self, problem: GemmProblem, device: Device) -> MmaConfig:
        """Return large tiles, or small ones where those would leave SMs without work."""
        tiles = ceil_div(problem.m, 128) * ceil_div(problem.n, 128)
        small = tiles < device.sms and not (problem.out == "int8" and problem.out_block == 128)
        return MmaConfig(64, 64, 2, 2, stages=4) if small else MmaConfig()

    def arguments(self, problem: GemmProblem, inputs: Tensors, outputs: Tensors) -> bytes:
        a, b = inputs["a"], inputs["b"]
        return struct.pack(
            "<6Q2q7Q3i4xQ",
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
            *(address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t")),
            address(inputs.get("seed")),
            problem.m,
            problem.n,
            problem.k,
            address(outputs.get("squares")),
        )


def _end(x: torch.Tensor) -> int:
    """Return the address after a tensor's last byte."""
    return x.data_ptr() + (x.shape[0] - 1) * x.stride(0) + x.shape[1]
