"""The sm_90a kernel's configuration, legality and launch."""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.hopper import (
    TILE_K,
    WgmmaKernel,
    operand_map,
    output_map,
    readable,
    tile_constants,
    wgmma_wrapper,
)
from jetfire.kernels_cuda.int4_gemm import cost
from jetfire.kernels_cuda.int4_gemm.config import SPACE, WgmmaConfig, cluster_tiles
from jetfire.kernels_cuda.int4_gemm.constants import problem_constants
from jetfire.kernels_cuda.program import Program, loaded

if TYPE_CHECKING:
    import torch

    from jetfire.ops.int4_gemm import Int4GemmProblem

SOURCE = Path(__file__).parent / "wgmma.cu"
STAGING_BYTES = 8192
# Registers of a thread that multiplies and of one that feeds it, by warp groups: at most what a
# launch gives to all warps together, in eights.
REGISTERS = {1: (240, 56), 2: (224, 56), 3: (152, 56), 4: (104, 56)}
# Sums of a thread that leave it registers for the rest, so that nothing spills, by warp groups.
MOST_SUMS = {1: 160, 2: 128, 3: 96, 4: 64}


def shared_bytes(problem: Int4GemmProblem, config: WgmmaConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    blocks = config.tile_n // problem.out_block if problem.out == "int8" else 0
    return (
        config.stages * (config.tile_m + config.tile_n) * TILE_K
        + config.groups * config.buffers * STAGING_BYTES
        + config.tile_m // 16 * blocks * 4
        + 16 * config.stages
    )


def _constants(problem: Int4GemmProblem) -> dict[str, bool | int]:
    """Return the constants of the epilogue; packed codes too reach it as wide ones."""
    return {**problem_constants(problem), "SHIFTED": problem.product != "wgrad"}


def program(problem: Int4GemmProblem, config: WgmmaConfig, tma_out: bool) -> Program:
    """Return the function of the product, for a C that TMA can write or not."""
    consumer, producer = REGISTERS[config.groups]
    constants: dict[str, bool | int] = {
        **_constants(problem),
        "TMA_OUT": tma_out,
        **tile_constants(config),
        "SPLIT": config.split,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "EXPECTED_SHARED_BYTES": (shared := shared_bytes(problem, config)),
    }
    text = header(constants, wgmma_wrapper(config.tile_n))
    return Program(SOURCE, text, shared, config.warps, "gemm", "a")


def _small(source: Path, constants: dict[str, bool | int]) -> Program:
    """Return one of the functions beside the product."""
    return Program(source, header(constants), 0, 8, features="a")


# By whether codes are packed; else rows are copied as they are.
UNPACK = {
    packed: _small(SOURCE.with_name("unpack.cu"), {"PACKED": packed}) for packed in (True, False)
}


@cache
def _reduce(problem: Int4GemmProblem, config: WgmmaConfig) -> Program:
    """Return what adds up the raw sums of a split product."""
    constants = {**_constants(problem), "SPLIT": config.split}
    return _small(SOURCE.with_name("reduce.cu"), constants)


def _tma_out(problem: Int4GemmProblem, out: int) -> bool:
    """Return whether TMA can write C: aligned rows of a multiple of 16 bytes."""
    return not (out % 16 or problem.n * driver.ELEMENT_BYTES[problem.out] % 16)


class WgmmaInt4Gemm(WgmmaKernel):
    op = "int4_gemm"
    Config = WgmmaConfig
    choices = SPACE

    def legal(self, problem: Int4GemmProblem, config: WgmmaConfig, device: Device) -> str | None:
        if reason := self.unfit(device) or self.outside(config):
            return reason
        sums = config.rows * config.tile_n // 2
        if sums > (most := MOST_SUMS[config.groups]):
            return f"{sums} sums per thread: {config.groups} groups have registers for {most}"
        if (needed := shared_bytes(problem, config)) > device.shared_bytes:
            return f"{needed} bytes of shared memory: {device.label} has {device.shared_bytes}"
        for name, size in (
            ("tile_m", config.tile_m // config.cluster_n),
            ("tile_n", config.tile_n // config.cluster_m),
        ):
            if size > 256 or size % 8:
                return (
                    f"{name}: {size} rows per block of the cluster, expected a multiple of 8 to 256"
                )
        if problem.out == "int8" and (reason := _no_codes(problem.out_block, config)):
            return reason
        if config.split > ceil_div(problem.k, TILE_K):
            return f"split={config.split}: expected at most {ceil_div(problem.k, TILE_K)}"
        if _slab(problem, config) * config.split * ceil_div(problem.n, 64) >= 2**31:
            return "more than 2^31 rows of panels"
        return None

    def default(self, problem: Int4GemmProblem, device: Device) -> WgmmaConfig:
        return cost.fastest(self, problem, device)

    def estimate(self, problem: Int4GemmProblem, config: WgmmaConfig, device: Device) -> float:
        return cost.estimate(problem, config, device)

    def programs(self, problem: Int4GemmProblem, config: WgmmaConfig) -> list[Program]:
        found = [program(problem, config, _tma_out(problem, 16))]
        if problem.operands == "packed":
            found.insert(0, UNPACK[True])
        if config.split > 1:
            found.append(_reduce(problem, config))
        return found

    def launch(
        self, problem: Int4GemmProblem, config: WgmmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        packed = problem.operands == "packed"
        a, b = _readable(inputs["a"], packed), _readable(inputs["b"], packed)
        raw, device = _raw(problem, config, a.device), Device.of(a)
        function, blocks, content = _prepare(
            problem,
            config,
            device,
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            a.shape[1],
            *_epilogue_pointers(inputs, outputs),
            address(outputs.get("scale")),
            address(raw),
        )
        function(blocks, 32 * config.warps, (content,))
        if raw is not None:
            _reduce(problem, config).launch(
                device,
                16 * driver.processors(device.index),
                np.uint64(raw.data_ptr()),
                np.int32(raw.stride(0)),
                np.int32(_slab(problem, config)),
                _epilogue(problem, *_epilogue_pointers(inputs, outputs)),
            )


def _no_codes(block: int, config: WgmmaConfig) -> str | None:
    """Return why a group has no whole blocks of codes to write."""
    if config.split > 1:
        return f"split={config.split} out=int8: expected split=1"
    for name, size in (("64·rows", 64 * config.rows), ("tile_n", config.tile_n)):
        if size % block:
            return f"{name}={size}: expected a multiple of {block} to write its blocks of codes"
    return None


def _epilogue_pointers(inputs: Tensors, outputs: Tensors) -> tuple[int, ...]:
    names = ("a_scale", "b_scale", "bias", "weight", "counts")
    return (*(address(inputs.get(name)) for name in names), address(next(iter(outputs.values()))))


def _epilogue(problem: Int4GemmProblem, *pointers: int) -> bytes:
    """Make the struct of epilogue.cuh."""
    return struct.pack("<6Q2i", *pointers, problem.m, problem.n)


def _slab(problem: Int4GemmProblem, config: WgmmaConfig) -> int:
    """Count the rows of a part's raw sums: whole (cluster) tiles, to keep off the next part."""
    tall = config.tile_m * config.cluster_m
    return ceil_div(problem.m, tall) * tall


def _raw(
    problem: Int4GemmProblem, config: WgmmaConfig, device: torch.device
) -> torch.Tensor | None:
    """Make room for the raw sums of a split product, in rows of a multiple of 16 bytes."""
    if config.split == 1:
        return None
    import torch

    shape = (config.split * _slab(problem, config), ceil_div(problem.n, 4) * 4)
    return torch.empty(shape, dtype=torch.int32, device=device)


def _readable(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Return codes in bytes, in aligned rows, apart, of a multiple of 16: x itself or a copy."""
    if not packed and readable(x):
        return x
    rows, columns = x.shape
    copy = x.new_empty((rows, ceil_div(columns, 8 if packed else 16) * 16))
    addresses = np.uint64(copy.data_ptr()), np.uint64(x.data_ptr())
    sizes = np.int32(rows), np.int32(columns), np.int64(x.stride(0))
    device = Device.of(x)
    UNPACK[packed].launch(device, 16 * driver.processors(device.index), *addresses, *sizes)
    return copy


@lru_cache(maxsize=16384)
def _prepare(
    problem: Int4GemmProblem,
    config: WgmmaConfig,
    device: Device,
    a: int,
    a_pitch: int,
    b: int,
    b_pitch: int,
    depth: int,
    a_scale: int,
    b_scale: int,
    bias: int,
    weight: int,
    counts: int,
    out: int,
    scale: int,
    raw: int,
) -> tuple[driver.Function, int, np.ndarray]:
    """Return function, blocks and argument of a launch: the same for the same addresses.

    Args:
        depth: bytes of a row of A and B: K, or what unpacking makes of it.
    """
    tma_out = _tma_out(problem, out)
    maps = (
        operand_map(a, problem.m, depth, a_pitch, config.tile_m, config.cluster_n),
        operand_map(b, problem.n, depth, b_pitch, config.tile_n, config.cluster_m),
        _output_map(problem, config, out if tma_out else 0, raw),
    )
    epilogue = _epilogue(problem, a_scale, b_scale, bias, weight, counts, out)
    rest = depth, _slab(problem, config), scale
    content = struct.pack("<128s128s128s56s2iQ", *maps, epilogue, *rest)
    workers = driver.processors(device.index) // config.cluster
    blocks = config.cluster * min(cluster_tiles(problem, config), workers)
    function = loaded(program(problem, config, tma_out), device)
    return function, blocks, driver.struct_argument(content, 512)


def _output_map(problem: Int4GemmProblem, config: WgmmaConfig, out: int, raw: int) -> bytes:
    """Make the tensor map of C, or of the raw sums, as floats that nobody adds to."""
    if raw:
        rows, columns = config.split * _slab(problem, config), ceil_div(problem.n, 4) * 4
        return output_map(config, raw, "fp32", rows, columns)
    if out:
        return output_map(config, out, problem.out, problem.m, problem.n)
    return driver.NO_MAP
