"""The Gluon kernel's configuration, legality and launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetfire.core.device import Device
from jetfire.core.kernel import Config
from jetfire.core.sanitizer import under_consan
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_triton.gemm.mainloop import gemm_kernel
from jetfire.kernels_triton.gemm.portable import TritonGemm
from jetfire.kernels_triton.kernel import EXACT, Launch, TritonKernel
from jetfire.kernels_triton.tiles import device_reason

if TYPE_CHECKING:
    import torch

TILE_M, TILE_N, TILE_K = 128, 256, 128


@dataclass(frozen=True)
class HopperConfig(Config):
    """Choices of how the 128×256 tiles are fed and promoted.

    Attributes:
        chunk: columns of one product: 128, or 64 with two of them in turn.
        stages: of 128 of K, on their way from memory.
        group: rows of tiles that are walked column by column.
        registers: of a consumer's thread; the producer has what two of them leave of 504.
    """

    chunk: int = 64
    stages: int = 4
    group: int = 8
    registers: int = 240


def shared_bytes(problem: Any, config: HopperConfig) -> int:
    """Count shared bytes: each stage's operands, scales, barriers, and what requantising needs."""
    count = 128 // problem.block
    stage = (TILE_M + TILE_N) * TILE_K + 8 * count**3 + 16
    return config.stages * stage + (17408 if problem.out == "int8" else 0)


def _descriptor(x: torch.Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [128, TILE_K], layout)


class GluonGemm(TritonKernel):
    op = "gemm"
    name = "gluon"
    Config = HopperConfig
    choices: ClassVar = {
        "chunk": (64, 128),
        "stages": (2, 3, 4),
        "group": (4, 8, 16),
        "registers": (232, 240),
    }

    def legal(self, problem: Any, config: HopperConfig, device: Device) -> str | None:
        if (reason := device_reason(device)) is not None:
            return reason
        if device.capability != (9, 0):
            return "needs sm_90: it is written in warp-group instructions"
        if problem.squares:
            return "squares=true: it has no sums of squares"
        if problem.k % 16:
            return f"k={problem.k}: TMA wants rows of a multiple of 16 bytes"
        if (reason := self.outside(config)) is not None:
            return reason
        if problem.out == "int8" and problem.block == 32:
            # The spills cost what the kernel gains: 402 TOPS at 8192³, 398 of the portable one.
            return "out=int8 block=32: requantising blocks of 32 spills registers"
        if problem.out_block != problem.block != 128:
            # 240 local loads and stores in the epilogue of 64 to 32, 249 of 64 to 128.
            return f"block={problem.block} out_block={problem.out_block}: spills registers"
        if problem.out == "int8" and problem.block == 128 and config.chunk != 128:
            # With chunks of 64, codes in blocks of 32 and 64 take 27 to 183 local loads and stores.
            return f"chunk={config.chunk}: expected 128 to requantise after blocks of 128"
        if under_consan() and (problem.block, config.stages) != (128, 2):
            # Half a minute to compile (Triton 3.6). With more barriers and scales it takes longer:
            # the default for blocks of 32 over ten minutes, and 12 GB.
            return "under consan: expected block=128 stages=2"
        if (needed := shared_bytes(problem, config)) > device.shared_bytes:
            return f"{needed} bytes of shared memory: {device.label} has {device.shared_bytes}"
        if ceil_div(problem.m, TILE_M) * ceil_div(problem.n, TILE_N) >= 2**31:
            return "more than 2^31 tiles"
        return None

    def default(self, problem: Any, device: Device) -> HopperConfig:
        stages = 2 if under_consan() else 4
        if problem.out_block != problem.block:
            # At most 26 local loads and stores a tile, none among the products; up to 99 where
            # codes are both biased and rounded stochastically.
            return HopperConfig(chunk=128, stages=stages, registers=240)
        if problem.block == 128:
            return HopperConfig(chunk=128, stages=stages, registers=232)
        # With bf16 and fp32 outputs, blocks of 32 spill at 232 and those of 64 at 240.
        return HopperConfig(registers=240 if problem.block == 32 else 232)

    def launches(self, problem: Any, config: HopperConfig, device: Device) -> tuple[Launch, ...]:
        tiles = ceil_div(problem.m, TILE_M) * ceil_div(problem.n, TILE_N)
        given = {"INT8": problem.out == "int8", "num_warps": 4, **EXACT}
        return (Launch(gemm_kernel, (min(tiles, device.sms),), problem, config, **given),)

    def tensors(
        self, problem: Any, config: HopperConfig, inputs: Tensors, outputs: Tensors
    ) -> Mapping[str, Any]:
        described = {name: _descriptor(inputs[name]) for name in ("a", "b")}
        return {**inputs, **outputs, **described}

    def launch(self, problem: Any, config: HopperConfig, inputs: Tensors, outputs: Tensors) -> None:
        a, b = inputs["a"], inputs["b"]
        if any(x.data_ptr() % 16 or x.stride(0) % 16 for x in (a, b)):
            # TMA cannot address such views; any other load can.
            portable = TritonGemm()
            portable.launch(problem, portable.default(problem, Device.of(a)), inputs, outputs)
            return
        super().launch(problem, config, inputs, outputs)
