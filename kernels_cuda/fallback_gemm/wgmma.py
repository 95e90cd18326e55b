"""The sm_90a kernel's configuration, legality and launch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import block_gemm, driver, hopper
from jetfire.kernels_cuda.block_gemm import OUTPUTS, STEP_US, TILE_US, BlockGemmConfig
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import ELEMENT_BYTES, address
from jetfire.kernels_cuda.hopper import (
    TILE_K,
    WgmmaKernel,
    operand_map,
    output_map,
    tile_constants,
    wgmma_wrapper,
)
from jetfire.kernels_cuda.noise import telescoped_noise
from jetfire.kernels_cuda.program import Program, loaded

if TYPE_CHECKING:
    import torch

    from jetfire.ops.fallback_gemm import FallbackGemmProblem

SOURCE = Path(__file__).parent / "wgmma.cu"
BLOCK = 128  # the only one: a step of K is a block
MOST_BLOCKS = 1024  # along K: a bit for each in the registers of a warp
TURNED_COLUMNS = 64  # that a panel of a tile's transpose has


@dataclass(frozen=True)
class FallbackConfig(BlockGemmConfig):
    """Choices of how a block's tile is cut and fed.

    Attributes:
        planes: which of a tile's sides is A's, which has two planes; the other is B's. Where that
            side lies in several blocks, the tile takes the steps in which any of these falls back.
    """

    planes: Literal["rows", "columns"] = "columns"

    @property
    def plane_rows(self) -> int:
        """Rows that a tile has of the operand with two planes."""
        return self.tile_n if self.planes == "columns" else self.tile_m

    def bands(self) -> int:
        """Return the most blocks that these rows lie in."""
        offset = BLOCK - min(BLOCK, self.plane_rows & -self.plane_rows)
        return ceil_div(offset + self.plane_rows, BLOCK)


def turned(problem: FallbackGemmProblem, config: FallbackConfig) -> bool:
    """Return whether a tile is written transposed: one side's operand gives C's rows."""
    return (config.planes == "columns") != problem.transpose


def sides(problem: FallbackGemmProblem, config: FallbackConfig) -> tuple[int, int]:
    """Return the rows of the operand of a tile's rows, and of that of its columns."""
    m, n = problem.m, problem.n
    return (n, m) if config.planes == "columns" else (m, n)


def shared_bytes(config: FallbackConfig) -> int:
    """Return a block's shared memory in bytes: the plain product's, and a mark for each slot."""
    return block_gemm.shared_bytes(BLOCK, config) + ceil_div(config.stages, 2) * 8


def program(problem: FallbackGemmProblem, config: FallbackConfig, tma_out: bool) -> Program:
    """Return the function for an output of some alignment."""
    consumer, producer = block_gemm.REGISTERS[config.groups]
    shared = shared_bytes(config)
    columns = config.planes == "columns"
    constants: dict[str, bool | int] = {
        "BLOCK": BLOCK,
        "OUT_BLOCK": BLOCK,
        "OUTPUT": OUTPUTS[problem.out],
        "BIAS": problem.bias and not columns,
        **dict.fromkeys(("ACCUMULATE", "STOCHASTIC", "Q", "QT"), False),
        "ROW_BIAS": problem.bias and columns,
        "PLANES_OF_B": columns,
        "TURNED": turned(problem, config),
        "TMA_OUT": tma_out,
        **tile_constants(config),
        "IN_FLIGHT": config.in_flight,
        "TELESCOPED": config.telescoped,
        "CONSUMER_REGISTERS": consumer,
        "PRODUCER_REGISTERS": producer,
        "EXPECTED_SHARED_BYTES": shared,
    }
    text = header(constants, wgmma_wrapper(config.tile_n))
    return Program(SOURCE, text, shared, config.warps, "fallback_gemm", "a")


def tma_writes(problem: FallbackGemmProblem, out: int) -> bool:
    """Return whether TMA can write a contiguous output at an address: rows of 16 bytes."""
    columns = problem.m if problem.transpose else problem.n
    return not (out % 16 or columns * ELEMENT_BYTES[problem.out] % 16)


class WgmmaFallback(WgmmaKernel):
    op = "fallback_gemm"
    Config = FallbackConfig
    choices: ClassVar = {
        "groups": (1, 2, 3, 4),
        "rows": (1, 2),
        "tile_n": (32, 64, 96, 128, 192),
        "stages": (3, 4, 5, 6, 7, 8),
        "buffers": (1, 2),
        "cluster_m": (1, 2),
        "cluster_n": (1, 2),
        "raster": (1, 2, 4, 8, 16, 32),
        "planes": ("rows", "columns"),
        "in_flight": (0, 1, 2),
        "schedule": ("exact", "telescoped"),
    }

    def legal(
        self, problem: FallbackGemmProblem, config: FallbackConfig, device: Device
    ) -> str | None:
        return (
            self.unfit(device)
            or self.outside(config)
            or _misfit(problem, config)
            or block_gemm.room_reason(config, shared_bytes(config), device)
            or block_gemm.tiles_reason(config, *sides(problem, config))
        )

    def default(self, problem: FallbackGemmProblem, device: Device) -> FallbackConfig:
        return _fastest(self, problem, device)

    def estimate(
        self, problem: FallbackGemmProblem, config: FallbackConfig, device: Device
    ) -> float | None:
        """Estimate microseconds by the plain product's steps, of which fallback adds some."""
        known = (config.groups, config.tile_n) in STEP_US and config.rows == 1
        return _microseconds(problem, config, device) if known else None

    def noise(
        self, problem: FallbackGemmProblem, config: FallbackConfig, inputs: Tensors
    ) -> torch.Tensor | None:
        """Return the bound of the plain product of each tile's steps; the larger where two meet."""
        if not config.telescoped:
            return None
        import torch

        down, across = (len(inputs[f"{name}_scale"]) for name in "ab")
        bound = torch.zeros((down, across), dtype=torch.float64, device=inputs["a"].device)
        for bands, operands in steps_of_tiles(problem, config, inputs):
            found = telescoped_noise(operands, BLOCK)
            bound[bands] = torch.maximum(bound[bands], found)
        return bound

    def programs(self, problem: FallbackGemmProblem, config: FallbackConfig) -> list[Program]:
        return [program(problem, config, tma_writes(problem, 0))]

    def launch(
        self,
        problem: FallbackGemmProblem,
        config: FallbackConfig,
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        a, r, b = (block_gemm.read_by_tma(inputs[name]) for name in "arb")
        function, blocks, content = _prepare(
            problem,
            config,
            Device.of(a),
            tuple((x.data_ptr(), x.stride(0)) for x in (a, r, b)),
            tuple(address(inputs[f"{name}_scale"]) for name in "arb"),
            address(inputs.get("bias")),
            address(outputs["c"]),
        )
        function(blocks, 32 * config.warps, (content,))


@lru_cache(maxsize=16384)
def _prepare(
    problem: FallbackGemmProblem,
    config: FallbackConfig,
    device: Device,
    codes: tuple[tuple[int, int], ...],
    scales: tuple[int, ...],
    bias: int,
    out: int,
) -> tuple[driver.Function, int, np.ndarray]:
    """Return function, blocks and argument of a launch: the same for the same addresses.

    Args:
        codes: address and pitch of A's, R's and B's.
        scales: address of theirs.
    """
    down, across = sides(problem, config)

    def of_rows(x: tuple[int, int]) -> bytes:
        return operand_map(x[0], down, problem.k, x[1], config.tile_m, config.cluster_n)

    def of_columns(x: tuple[int, int]) -> bytes:
        return operand_map(x[0], across, problem.k, x[1], config.tile_n, config.cluster_m)

    (a, r, b), (a_scale, r_scale, b_scale) = codes, scales
    if config.planes == "columns":
        maps = of_rows(b), of_columns(a), of_columns(r)
        a_scale, b_scale = b_scale, a_scale
    else:
        maps = of_rows(a), of_columns(b), of_rows(r)
    tma_out = tma_writes(problem, out)
    content = struct.pack(
        "<128s128s128s128s10Q3i",
        *maps,
        _output_map(problem, config, out) if tma_out else driver.NO_MAP,
        *(a_scale, b_scale, r_scale),
        *(out, bias, 0, 0, 0, 0, 0),
        *(down, across, problem.k),
    )
    tiles, processors = config.cluster_tiles(down, across), driver.processors(device.index)
    blocks = min(tiles, processors // config.cluster) * config.cluster
    function = loaded(program(problem, config, tma_out), device)
    return function, blocks, driver.struct_argument(content, 640)


def _output_map(problem: FallbackGemmProblem, config: FallbackConfig, out: int) -> bytes:
    """Make the tensor map of C, or of Cᵀ, which has a tile's rows or its columns as rows."""
    down, across = sides(problem, config)
    if not turned(problem, config):
        return output_map(config, out, problem.out, down, across)
    element = ELEMENT_BYTES[problem.out]
    box = TURNED_COLUMNS, 128 // element
    return driver.tensor_map(out, problem.out, across, down, down * element, *box)


def _misfit(problem: FallbackGemmProblem, config: FallbackConfig) -> str | None:
    """Return why the tile does not suit the problem, the cluster or the way to memory."""
    if problem.block != BLOCK:
        return f"block={problem.block}: expected {BLOCK}"
    if problem.k > MOST_BLOCKS * BLOCK:
        return f"k={problem.k}: expected at most {MOST_BLOCKS * BLOCK}"
    apart = "cluster_n" if config.planes == "columns" else "cluster_m"
    if getattr(config, apart) > 1:
        return f"{apart}=2 planes={config.planes}: expected 1, or its blocks would differ in steps"
    if reason := block_gemm.boxes_reason(config):
        return reason
    if turned(problem, config) and config.tile_n % TURNED_COLUMNS:
        needs = f"expected a multiple of {TURNED_COLUMNS} to write tiles transposed"
        return f"tile_n={config.tile_n} planes={config.planes}: {needs}"
    return None


# --- steps and what they cost --------------------------------------------------------------------


def steps_of_tiles(
    problem: FallbackGemmProblem, config: FallbackConfig, inputs: Tensors
) -> Iterator[tuple[slice, Tensors]]:
    """Yield rows of A's blocks, and the plain product that a tile of these computes.

    Its blocks along K are the tile's steps, in order.
    """
    from jetfire.reference.fallback_gemm import side_by_side

    a, r, b = ((inputs[name], inputs[f"{name}_scale"]) for name in "arb")
    codes_a, scales_a, codes_b, scales_b = side_by_side(*a, *r, *b, BLOCK)
    count = r[1].shape[1]
    for top in range(0, problem.m, config.plane_rows):
        end = min(top + config.plane_rows, problem.m)
        bands = slice(top // BLOCK, ceil_div(end, BLOCK))
        falls = (r[1][bands] != 0).any(dim=0).nonzero().flatten().tolist()
        steps = [*range(count), *(count + block for block in falls)]
        rows = slice(bands.start * BLOCK, bands.stop * BLOCK)
        left = _blocks(codes_a[rows], steps), scales_a[bands][:, steps]
        right = _blocks(codes_b, steps), scales_b[:, steps]
        yield bands, dict(zip(("a", "a_scale", "b", "b_scale"), (*left, *right), strict=True))


def _blocks(codes: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Return codes in these blocks along K."""
    return codes.unflatten(1, (-1, BLOCK))[:, steps].flatten(1)


@lru_cache(maxsize=4096)
def _fastest(kernel: WgmmaFallback, problem: FallbackGemmProblem, device: Device) -> FallbackConfig:
    """Return the candidate that should be fastest; every call of a model asks."""

    def price(config: FallbackConfig) -> float:
        return _microseconds(problem, config, device)

    candidates = [
        FallbackConfig(
            groups=groups,
            tile_n=tile_n,
            stages=(stages := min(8, 180_000 // ((64 * groups + tile_n) * TILE_K))),
            buffers=1 if stages * (64 * groups + tile_n) * TILE_K > 170_000 else 2,
            planes=planes,
            in_flight=2 if (groups, tile_n) == (3, 128) else 0,
            schedule="telescoped",
        )
        for groups, tile_n in STEP_US
        for planes in ("rows", "columns")
    ]
    found: FallbackConfig = hopper.fastest(kernel, problem, device, candidates, price)
    return found


def _microseconds(problem: FallbackGemmProblem, config: FallbackConfig, device: Device) -> float:
    _, step_us = STEP_US[config.groups, config.tile_n]
    kept = (1 - problem.percent / 100) ** config.bands()  # blocks of K that no band falls back in
    steps = ceil_div(problem.k, TILE_K) * (2 - kept)
    tiles = config.cluster_tiles(*sides(problem, config))
    return ceil_div(tiles, device.sms // config.cluster) * (steps * step_us + TILE_US)
