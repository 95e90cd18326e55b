"""The sm_90a kernel's configuration, legality and launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jetfire.core.device import Device
from jetfire.core.kernel import Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.hopper import TILE_K, outside, unfit, wgmma_wrapper
from jetfire.kernels_cuda.int4_gemm import cost
from jetfire.kernels_cuda.int4_gemm.config import SPACE, WgmmaConfig, cluster_tiles
from jetfire.kernels_cuda.int4_gemm.constants import problem_constants

if TYPE_CHECKING:
    import torch

    from jetfire.ops.int4_gemm import Int4GemmProblem

SOURCE = Path(__file__).parent / "wgmma.cu"
UNPACK, REDUCE = SOURCE.with_name("unpack.cu"), SOURCE.with_name("reduce.cu")
STAGING_BYTES = 8192
# Registers of a thread that multiplies and of one that feeds it, by warp groups: at most what a
# launch gives to all warps together, in eights.
REGISTERS = {1: (240, 56), 2: (224, 56), 3: (152, 56), 4: (104, 56)}
# Sums of a thread that leave it registers for the rest, so that nothing spills, by warp groups.
MOST_SUMS = {1: 160, 2: 128, 3: 96, 4: 64}


def shared_bytes(config: WgmmaConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    return (
        config.stages * (config.tile_m + config.tile_n) * TILE_K
        + config.groups * config.buffers * STAGING_BYTES
        + 16 * config.stages
    )


def _constants(problem: Int4GemmProblem) -> dict[str, bool | int]:
    """Return the constants of the epilogue; packed codes too reach it as wide ones."""
    return {**problem_constants(problem), "SHIFTED": problem.product != "wgrad"}


def config_header(problem: Int4GemmProblem, config: WgmmaConfig, tma_out: bool) -> str:
    """Write the kernel's constants as a header."""
    consumer, producer = REGISTERS[config.groups]
    constants: dict[str, bool | int] = {
        **_constants(problem),
        "TMA_OUT": tma_out,
        "GROUPS": config.groups,
        "ROWS": config.rows,
        "TILE_N": config.tile_n,
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "CLUSTER_M": config.cluster_m,
        "CLUSTER_N": config.cluster_n,
        "RASTER": config.raster,
        "SPLIT": config.split,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "EXPECTED_SHARED_BYTES": shared_bytes(config),
    }
    return header(constants, wgmma_wrapper(config.tile_n))


def _tma_out(problem: Int4GemmProblem, out: int) -> bool:
    """Return whether TMA can write C: aligned rows of a multiple of 16 bytes."""
    return not (out % 16 or problem.n * driver.ELEMENT_BYTES[problem.out] % 16)


class WgmmaInt4Gemm(Kernel):
    op = "int4_gemm"
    name = "wgmma"
    Config = WgmmaConfig

    def legal(self, problem: Int4GemmProblem, config: WgmmaConfig, device: Device) -> str | None:
        if reason := unfit(device) or outside(config, SPACE):
            return reason
        sums = config.rows * config.tile_n // 2
        if sums > (most := MOST_SUMS[config.groups]):
            return f"{sums} sums per thread: {config.groups} groups have registers for {most}"
        if (needed := shared_bytes(config)) > device.shared_bytes:
            return f"{needed} bytes of shared memory: {device.label} has {device.shared_bytes}"
        for name, size in (
            ("tile_m", config.tile_m // config.cluster_n),
            ("tile_n", config.tile_n // config.cluster_m),
        ):
            if size > 256 or size % 8:
                return (
                    f"{name}: {size} rows per block of the cluster, expected a multiple of 8 to 256"
                )
        if config.split > ceil_div(problem.k, TILE_K):
            return f"split={config.split}: expected at most {ceil_div(problem.k, TILE_K)}"
        if _slab(problem, config) * config.split * ceil_div(problem.n, 64) >= 2**31:
            return "more than 2^31 rows of panels"
        return None

    def default(self, problem: Int4GemmProblem, device: Device) -> WgmmaConfig:
        return cost.fastest(self, problem, device)

    def estimate(self, problem: Int4GemmProblem, config: WgmmaConfig, device: Device) -> float:
        return cost.estimate(problem, config, device)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def cubins(
        self, problem: Int4GemmProblem, config: WgmmaConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        text = config_header(problem, config, _tma_out(problem, 16))
        found = [Cubin("gemm", _cubin(SOURCE, text), shared_bytes(config), 4 * (config.groups + 1))]
        if problem.operands == "packed":
            found.insert(0, Cubin("unpack", _cubin(UNPACK, _unpack_header(True)), 0, 8))
        if config.split > 1:
            found.append(Cubin("reduce", _cubin(REDUCE, _reduce_header(problem, config)), 0, 8))
        return found

    def launch(
        self, problem: Int4GemmProblem, config: WgmmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        packed = problem.operands == "packed"
        a, b = _readable(inputs["a"], packed), _readable(inputs["b"], packed)
        raw = _raw(problem, config, a.device)
        function, blocks, threads, arguments = _prepare(
            problem,
            config,
            a.device.index,
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            a.shape[1],
            *_epilogue_pointers(inputs, outputs),
            address(raw),
        )
        function(blocks, threads, arguments)
        if raw is not None:
            epilogue = _epilogue(problem, *_epilogue_pointers(inputs, outputs))
            _small(REDUCE, _reduce_header(problem, config), a.device.index)(
                16 * driver.processors(a.device.index),
                256,
                (
                    np.uint64(raw.data_ptr()),
                    np.int32(raw.stride(0)),
                    np.int32(_slab(problem, config)),
                    driver.struct_argument(epilogue, len(epilogue)),
                ),
            )


def _epilogue_pointers(inputs: Tensors, outputs: Tensors) -> tuple[int, ...]:
    names = ("a_scale", "b_scale", "bias", "weight", "counts")
    return (*(address(inputs.get(name)) for name in names), address(outputs["c"]))


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
    rows, columns = x.shape
    if not (packed or x.data_ptr() % 16 or x.stride(0) % 16 or x.stride(0) < columns):
        return x
    copy = x.new_empty((rows, ceil_div(columns, 8 if packed else 16) * 16))
    _small(UNPACK, _unpack_header(packed), x.device.index)(
        16 * driver.processors(x.device.index),
        256,
        (
            np.uint64(copy.data_ptr()),
            np.uint64(x.data_ptr()),
            np.int32(rows),
            np.int32(columns),
            np.int64(x.stride(0)),
        ),
    )
    return copy


def _unpack_header(packed: bool) -> str:
    return header({"PACKED": packed})


def _reduce_header(problem: Int4GemmProblem, config: WgmmaConfig) -> str:
    return header({**_constants(problem), "SPLIT": config.split})


def _cubin(source: Path, text: str) -> bytes:
    return compile_cubin(source, text, "sm_90a")


@cache
def _small(source: Path, text: str, device: int) -> driver.Function:
    """Load one of the kernels beside the product, kept for ever, since graphs hold it."""
    return driver.Function(_cubin(source, text), source.stem, device, 0)


@cache
def _function(text: str, shared: int, device: int) -> driver.Function:
    """Load the kernel with this `config.cuh`, all that the code depends on; it is kept for ever."""
    return driver.Function(_cubin(SOURCE, text), "gemm", device, shared)


@lru_cache(maxsize=16384)
def _prepare(
    problem: Int4GemmProblem,
    config: WgmmaConfig,
    device: int,
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
    raw: int,
) -> tuple[driver.Function, int, int, tuple[Any, ...]]:
    """Return kernel, blocks, threads and arguments of a launch: the same for the same addresses.

    Args:
        depth: bytes of a row of A and B: K, or what unpacking makes of it.
    """
    tma_out = _tma_out(problem, out)
    maps = (
        driver.tensor_map(
            a, "int8", problem.m, depth, a_pitch, config.tile_m // config.cluster_n, TILE_K
        ),
        driver.tensor_map(
            b, "int8", problem.n, depth, b_pitch, config.tile_n // config.cluster_m, TILE_K
        ),
        _output_map(problem, config, out if tma_out else 0, raw),
    )
    epilogue = _epilogue(problem, a_scale, b_scale, bias, weight, counts, out)
    content = struct.pack("<128s128s128s56s2i", *maps, epilogue, depth, _slab(problem, config))
    blocks = config.cluster * min(
        cluster_tiles(problem, config), driver.processors(device) // config.cluster
    )
    function = _function(config_header(problem, config, tma_out), shared_bytes(config), device)
    return function, blocks, 128 * (config.groups + 1), (driver.struct_argument(content, 448),)


def _output_map(problem: Int4GemmProblem, config: WgmmaConfig, out: int, raw: int) -> bytes:
    """Make the tensor map of C, or of the raw sums, as floats that nobody adds to."""
    name = "fp32" if raw else problem.out
    if not (out or raw):
        return driver.NO_MAP
    element = driver.ELEMENT_BYTES[name]
    width = 128 if config.tile_n * element % 128 == 0 else 64
    rows, columns = problem.m, problem.n
    if raw:
        rows, columns = config.split * _slab(problem, config), ceil_div(columns, 4) * 4
    return driver.tensor_map(
        raw or out, name, rows, columns, columns * element, 64, width // element
    )
