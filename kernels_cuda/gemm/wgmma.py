"""The sm_90a kernel's configuration, legality and launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.core.workspace import counters
from jetfire.kernels_cuda import block_gemm, driver
from jetfire.kernels_cuda.block_gemm import (
    REGISTERS,
    boxes_reason,
    read_by_tma,
    room_reason,
    tiles_reason,
)
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.gemm import cost
from jetfire.kernels_cuda.gemm.config import PARTS_A_TILE, WgmmaConfig, bands, clusters
from jetfire.kernels_cuda.gemm.constants import problem_constants
from jetfire.kernels_cuda.hopper import (
    TILE_K,
    WgmmaKernel,
    operand_map,
    output_map,
    tile_constants,
    wgmma_wrapper,
)
from jetfire.kernels_cuda.noise import cut_noise, telescoped_noise
from jetfire.kernels_cuda.program import Program, loaded

if TYPE_CHECKING:
    import torch

    from jetfire.ops.gemm import GemmProblem

SOURCE = Path(__file__).parent / "wgmma.cu"


class Band(IntEnum):
    """The rows that a launch computes: numbers of the source's `enum Band`."""

    EVERY_ROW = 0
    ABOVE = 1
    BELOW = 2


@dataclass(frozen=True)
class TmaOutputs:
    """The outputs, (q or c) and qt, that TMA can write: aligned rows of a multiple of 16 bytes."""

    out: bool
    qt: bool

    @classmethod
    def of(cls, problem: GemmProblem, out: int, qt: int) -> TmaOutputs:
        """Return which of contiguous outputs TMA can write; an address of 0 stands for none."""
        pitch = problem.n * driver.ELEMENT_BYTES[problem.out]
        return cls(
            out=bool(out) and not (out % 16 or pitch % 16),
            qt=bool(qt) and not (qt % 16 or problem.m % 16),
        )

    @classmethod
    def contiguous(cls, problem: GemmProblem) -> TmaOutputs:
        """Return which of contiguous outputs at multiples of 16 bytes TMA can write."""
        return cls.of(problem, 16 * (problem.layout != "qt"), 16 * (problem.layout != "q"))


def shared_bytes(problem: GemmProblem, config: WgmmaConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    staging = 64 * config.tile_n if problem.layout != "q" and config.tile_n > 128 else 8192
    amax = 0
    if problem.out == "int8":
        amax = 8 * config.groups * config.rows * max(config.tile_n // problem.out_block, 1)
    return block_gemm.shared_bytes(problem.block, config, staging) + ceil_div(amax, 2) * 8


def program(
    problem: GemmProblem, config: WgmmaConfig, path: TmaOutputs, band: Band = Band.EVERY_ROW
) -> Program:
    """Return the function for outputs of some alignment."""
    consumer, producer = REGISTERS[config.groups]
    shared = shared_bytes(problem, config)
    constants: dict[str, bool | int] = {
        **problem_constants(problem),
        "TMA_OUT": path.out,
        "TMA_QT": path.qt,
        **tile_constants(config),
        "BAND": band,
        "IN_FLIGHT": config.in_flight,
        "STREAM": config.stream,
        "TELESCOPED": config.telescoped,
        "INTERLEAVED": config.chains > 1,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "EXPECTED_SHARED_BYTES": shared,
    }
    text = header(constants, wgmma_wrapper(config.tile_n))
    return Program(SOURCE, text, shared, config.warps, "gemm", "a")


class WgmmaGemm(WgmmaKernel):
    op = "gemm"
    Config = WgmmaConfig
    choices: ClassVar = {
        "groups": (1, 2, 3, 4),
        "rows": (1, 2),
        "tile_n": (32, 64, 96, 128, 192),
        "stages": (3, 4, 5, 6, 7, 8),
        "buffers": (1, 2),
        "cluster_m": (1, 2, 4),
        "cluster_n": (1, 2, 4),
        "raster": (1, 2, 4, 8, 16, 32),
        "in_flight": (0, 1, 2),
        "stream": (False, True),
        "schedule": ("exact", "telescoped", "interleaved"),
    }

    def space(self, problem: GemmProblem, device: Device) -> dict[str, Sequence[Any]]:
        names = self.choices["schedule"]
        if problem.block != TILE_K:
            names = tuple(name for name in names if name != "interleaved")
        return {**self.choices, "schedule": names}

    def schedules(self, problem: GemmProblem, device: Device) -> list[WgmmaConfig]:
        found = []
        for name in self.space(problem, device)["schedule"]:
            like = "telescoped" if name == "exact" else name
            found.append(replace(cost.fastest(self, problem, device, like), schedule=name))
        return found

    def legal(self, problem: GemmProblem, config: WgmmaConfig, device: Device) -> str | None:
        return (
            self.unfit(device)
            or self.outside(config)
            or _misfit(problem, config)
            or room_reason(config, shared_bytes(problem, config), device)
            or tiles_reason(config, problem.m, problem.n)
        )

    def default(self, problem: GemmProblem, device: Device) -> WgmmaConfig:
        return cost.fastest(self, problem, device)

    def estimate(self, problem: GemmProblem, config: WgmmaConfig, device: Device) -> float | None:
        return cost.estimate(problem, config, device)

    def noise(
        self, problem: GemmProblem, config: WgmmaConfig, inputs: Tensors
    ) -> torch.Tensor | None:
        if config.telescoped:
            parts = PARTS_A_TILE + 1 if config.stream else 0
            return telescoped_noise(inputs, problem.block, parts, config.chains)
        return cut_noise(inputs) if config.stream else None

    def programs(self, problem: GemmProblem, config: WgmmaConfig) -> list[Program]:
        path = TmaOutputs.contiguous(problem)
        if not config.banded:
            return [program(problem, config, path)]
        above = program(problem, config, path, Band.ABOVE)
        return [above, program(problem, config.below, path, Band.BELOW)]

    def launch(
        self, problem: GemmProblem, config: WgmmaConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        a, b = read_by_tma(inputs["a"]), read_by_tma(inputs["b"])
        out, qt = outputs.get("c", outputs.get("q")), outputs.get("qt")
        flags, sums = _workspace(problem, config, a.device)
        launches = _prepare(
            problem,
            config,
            Device.of(a),
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            address(inputs["a_scale"]),
            address(inputs["b_scale"]),
            address(inputs.get("bias")),
            address(inputs.get("seed")),
            address(out),
            address(outputs.get("scale")),
            address(qt),
            address(outputs.get("scale_t")),
            address(flags),
            address(sums),
            address(outputs.get("squares")),
        )
        for one in launches:
            if one.beside:
                one.function.launch_beside(one.blocks, 32 * config.warps, one.content)
            else:
                one.function(one.blocks, 32 * config.warps, (one.content,))


def _workspace(
    problem: GemmProblem, config: WgmmaConfig, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what blocks that share a tile need: flags at zero, and room for sums.

    A block has a flag per group and room for one tile. Only the flags outlast a launch: sums may
    lie wherever memory is free on this stream, or in the graph that is being captured.
    """
    if not config.stream:
        return None, None
    import torch

    flags, sums = workspace_sizes(problem, config, driver.processors(device.index))
    return counters(device, flags), torch.empty(sums, dtype=torch.float32, device=device)


def workspace_sizes(problem: GemmProblem, config: WgmmaConfig, processors: int) -> tuple[int, int]:
    """Count the flags and the sums of a launch of a `stream` config."""
    blocks = clusters(problem, config, processors) * config.cluster
    return blocks * config.groups, blocks * config.tile_m * config.tile_n


@dataclass(frozen=True)
class Launch:
    """A function, how many blocks it has and what it is given.

    Attributes:
        beside: it starts while the launch before it runs.
    """

    function: driver.Function
    blocks: int
    content: np.ndarray
    beside: bool


@lru_cache(maxsize=16384)
def _prepare(
    problem: GemmProblem,
    config: WgmmaConfig,
    device: Device,
    a: int,
    a_pitch: int,
    b: int,
    b_pitch: int,
    a_scale: int,
    b_scale: int,
    bias: int,
    seed: int,
    out: int,
    scale: int,
    qt: int,
    scale_t: int,
    flags: int,
    sums: int,
    squares: int,
) -> list[Launch]:
    """Return the launches of a product: the same for the same addresses."""
    path = TmaOutputs.of(problem, out, qt)
    int8 = problem.out == "int8"
    written = (
        output_map(config, out, problem.out, problem.m, problem.n) if path.out else driver.NO_MAP,
        driver.tensor_map(qt, "int8", problem.n, problem.m, problem.m, config.tile_n, 64)
        if path.qt
        else driver.NO_MAP,
    )
    rest = struct.pack(
        "<9Q3i4x3Q",
        a_scale,
        b_scale,
        0 if int8 else out,
        bias,
        out if int8 else 0,
        scale,
        qt,
        scale_t,
        seed,
        problem.m,
        problem.n,
        problem.k,
        flags,
        sums,
        squares,
    )

    found: list[Launch] = []
    for one in _portions(problem, config, path, device):
        maps = (
            operand_map(a, problem.m, problem.k, a_pitch, one.config.tile_m, one.config.cluster_n),
            operand_map(b, problem.n, problem.k, b_pitch, one.config.tile_n, one.config.cluster_m),
        )
        content = b"".join((*maps, *written, rest, struct.pack("<i", one.border)))
        function = loaded(program(problem, one.config, path, one.band), device)
        blocks, argument = one.clusters * one.config.cluster, driver.struct_argument(content, 640)
        found.append(Launch(function, blocks, argument, beside=bool(found)))
    return found


@dataclass(frozen=True)
class Portion:
    """The rows of one launch, and how many clusters compute them."""

    config: WgmmaConfig
    band: Band
    border: int
    clusters: int


@lru_cache(maxsize=4096)
def _portions(
    problem: GemmProblem, config: WgmmaConfig, path: TmaOutputs, device: Device
) -> list[Portion]:
    """Return what each launch of a product computes: one if the config is not `banded`, or two."""
    processors = driver.processors(device.index)
    if not config.banded:
        return [Portion(config, Band.EVERY_ROW, 0, clusters(problem, config, processors))]
    function = loaded(program(problem, config, path, Band.ABOVE), device)
    held = function.clusters(config.cluster, 32 * config.warps)
    large = min(held, processors // config.cluster)  # an SM has one block, if there is room for two
    others = (processors - large * config.cluster) // 2
    border = bands(problem, config, large, others).border
    above = min(large, config.cluster_tiles(border, problem.n))
    below = min(others, config.below.cluster_tiles(problem.m - border, problem.n))
    found = [
        Portion(config, Band.ABOVE, border, above),
        Portion(config.below, Band.BELOW, border, below),
    ]
    return [one for one in found if one.clusters]


def _misfit(problem: GemmProblem, config: WgmmaConfig) -> str | None:
    """Return why the tile does not suit the problem's blocks or the cluster."""
    block = problem.out_block
    if config.stream and config.cluster > 2:
        return (
            f"stream=True cluster_m·cluster_n={config.cluster}: expected at most 2, or not all "
            "blocks would run at once"
        )
    if config.cluster > 8:
        return f"cluster_m·cluster_n={config.cluster}: expected at most 8 blocks per cluster"
    if reason := boxes_reason(config):
        return reason
    if config.chains > 1 and problem.block != TILE_K:
        return f"schedule={config.schedule} block={problem.block}: expected blocks of {TILE_K}"
    for name, size in (("tile_m", config.tile_m), ("tile_n", config.tile_n)):
        if problem.out == "int8" and size % block:
            return f"{name}={size}: expected a multiple of {block} to requantise blocks of it"
    if problem.out == "int8" and block == 128 and config.rows == 1 and config.groups % 2:
        return f"groups={config.groups}: expected an even number to requantise blocks of 128"
    return None
