"""The norms' gradient in CUDA C++: configuration, legality and both launches of it.

norm_sums.cuh adds up over rows and columns, norm_gradient.cuh writes the gradient. Instructions
issued per element from blocks of 32 to blocks of 128, stochastic, layout both, counted in the loops
as compiled for sm_90: sums 15 (RMSNorm's 11); gradient 21, with the residual stream 27. An H200
issues one per element of 8192×1024 in 0.28 µs at 1.755 GHz; its memory takes 4 µs for the first
launch, 8 for the second and 15.8 with the stream. The second launch starts while the last blocks of
the first run (launches.cuh): with it LayerNorm's backward at 8192×4096, plain, takes 60.5 µs, and
62.4 without (`jetfire bench`, on two H200s).

One launch would read each tile once: a block keeps it in shared memory until the other blocks of
its rows have published their sums. Built and measured, it took 77.4 µs where the two took 59.7, and
122 where they took 103 with the residual stream (by a script, on one H200). It issued 39
instructions per element, at 54% of the peak rate. A block holds one tile while it adds up the next,
so that no more than 16 warps fit on an SM. And each tile reads back 32 parts of each row's sums,
which at this width are as many bytes as the tile has.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core.device import Device
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver, tiles
from jetfire.kernels_cuda.compile import header
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import PARTS, TILE, Access, PartsConfig, TmaKernel

if TYPE_CHECKING:
    import torch

ARGUMENT_BYTES = 640  # of a struct that is aligned to 64
Launch = Literal["sums", "gradient"]
# The launches in their order, and what their fields of a config begin with.
PREFIXES: dict[Launch, str] = {"sums": "sums_", "gradient": ""}
INPUTS = ("x", "dy")


@dataclass(frozen=True)
class NormTilesConfig(PartsConfig):
    """Choices of who works on a tile.

    Attributes:
        sums_stages, sums_resident: stages and resident of the launch that adds up.
    """

    sums_stages: int = 2
    sums_resident: int = 2


WORDS = Access(tma=True, q=8, qt=4, stream=16)


def shared_bytes(launch: Launch, config: NormTilesConfig, sums: int) -> int:
    """Return a block's shared memory in bytes; the sources assert that they count the same."""
    stages = config.sums_stages if launch == "sums" else config.stages
    ring = stages * 2 * (TILE * TILE + 4 * PARTS) + 32
    if launch == "sums":
        return ring + stages * 8 * TILE + 4 * 4 * sums * TILE
    return ring + stages * 4 * TILE + 16 * TILE + config.warps * 4 * sums * 32 + 4 * PARTS


def registers(launch: Launch, problem: Any, config: NormTilesConfig) -> int:
    """Return the registers that a thread needs so that nothing spills, as audited on sm_90."""
    if launch == "sums" or config.warps == PARTS:
        return 80
    if problem.residual:  # its values are bf16
        narrow = problem.layout == "both" and problem.rounding == "stochastic"
        return 80 if narrow and problem.out_block != 64 else 128
    return 80 if problem.out_block == 32 else 128


def sums_header(problem: Any, config: NormTilesConfig, access: Access, sums: int) -> str:
    """Write the constants of norm_sums.cuh as a header."""
    constants: dict[str, bool | int] = {
        "WARPS": config.warps,
        "STAGES": config.sums_stages,
        "RESIDENT": config.sums_resident,
        "SHARED_BYTES": shared_bytes("sums", config, sums),
        "BLOCK": problem.block,
        "TMA": access.tma,
    }
    return header(constants)


def gradient_header(problem: Any, config: NormTilesConfig, access: Access, sums: int) -> str:
    """Write the constants of norm_gradient.cuh as a header."""
    # Addresses of bytes want registers: 128 per thread.
    resident = config.resident if access == WORDS else min(config.resident, 16 // config.warps)
    own: dict[str, bool | int] = {
        "RESIDUAL": problem.residual,
        "WHOLE_LANES": problem.n % 8 == 0,
        "STREAM_ACCESS": access.stream,
    }
    shared = shared_bytes("gradient", config, sums)
    return tiles.writes_header(problem, config, shared, access, own, resident)


def accesses(problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None) -> Access:
    """Return the accesses of a launch; without tensors those of aligned, contiguous ones."""
    m, n = problem.m, problem.n
    places, streams = [n], [2 * n]
    if inputs is not None:
        places = tiles.places(inputs, INPUTS)
        streams += tiles.places(inputs, ("dsum",))
    apart = tiles.in_boxes(streams)
    if inputs is not None and "dsum" in inputs:
        apart = apart and address((outputs or {}).get("dx")) % 16 == 0
    stream = 16 if apart else 2
    return Access(tiles.in_boxes(places), *tiles.write_access(m, n, outputs), stream)


class NormTiles(TmaKernel):
    """A norm's gradient, for blocks of the grid that go over tiles of 128×128 codes, twice.

    Attributes:
        sources: of the launch that adds up, and of the one that writes the gradient.
        sums: the op's outputs that are sums over rows.
    """

    candidate = False
    Config = NormTilesConfig
    choices: ClassVar = {
        "warps": (8, 16),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3),
        "sums_stages": (2, 3, 4),
        "sums_resident": (1, 2, 3),
    }
    sources: ClassVar[tuple[Path, Path]]
    sums: ClassVar[tuple[str, ...]]

    def legal(self, problem: Any, config: NormTilesConfig, device: Device) -> str | None:
        if (reason := self.unfit(device)) is not None:
            return reason
        if problem.mode != "bwd":
            return "mode=fwd: expected bwd"
        if (reason := self.outside(config) or tiles.oversized(problem)) is not None:
            return reason
        for launch, prefix in PREFIXES.items():
            each = registers(launch, problem, config)
            shared = shared_bytes(launch, config, len(self.sums))
            reason = tiles.room_reason(config, config.warps, each, shared, device, prefix)
            if reason is not None:
                return reason
        return None

    def default(self, problem: Any, device: Device) -> NormTilesConfig:
        """Return one block of 16 warps per SM beside the residual stream, else two of 8 warps.

        By a script on an H200, it had the least time of eight configs, or at most 1.12 of that, at
        11 sizes from 1024×1024 to 8192×4096, in five forms each.
        """
        if problem.residual:
            return NormTilesConfig(16, 2, 1, 3, 1)
        return NormTilesConfig(8, 2, 2, 2, 2)

    def programs(self, problem: Any, config: NormTilesConfig) -> list[Program]:
        return list(self.by_launch(problem, config, accesses(problem)).values())

    def by_launch(
        self, problem: Any, config: NormTilesConfig, access: Access
    ) -> dict[Launch, Program]:
        """Return each launch's function for tensors of some alignment."""
        sums = len(self.sums)
        texts = (write(problem, config, access, sums) for write in (sums_header, gradient_header))
        return {
            launch: Program(source, text, shared_bytes(launch, config, sums), config.warps)
            for launch, source, text in zip(PREFIXES, self.sources, texts, strict=True)
        }

    def launch(
        self, problem: Any, config: NormTilesConfig, inputs: Tensors, outputs: Tensors
    ) -> None:
        import torch

        device, sums = Device.of(inputs["x"]), len(self.sums)
        access = accesses(problem, inputs, outputs)
        processors = driver.processors(device.index)
        strips, down = ceil_div(problem.n, TILE), ceil_div(problem.m, TILE)
        each = blocks_per_strip(problem, config, processors)
        empty = functools.partial(torch.empty, dtype=torch.float32, device=inputs["x"].device)
        row_parts = empty((strips, problem.m, sums))
        column_parts = empty((each, problem.n, sums))
        content = arguments(problem, inputs, outputs, access, row_parts, column_parts)
        adds_up, writes = _programs(self, problem, config, access)
        adds_up.launch(device, each * strips, content)
        writes.launch_beside(device, min(strips * down, config.resident * processors), content)


@functools.lru_cache(maxsize=1024)
def _programs(
    kernel: NormTiles, problem: Any, config: NormTilesConfig, access: Access
) -> list[Program]:
    return list(kernel.by_launch(problem, config, access).values())


def blocks_per_strip(problem: Any, config: NormTilesConfig, processors: int) -> int:
    """Return how many blocks go down a strip of columns, so that all run at once."""
    strips, down = ceil_div(problem.n, TILE), ceil_div(problem.m, TILE)
    return min(down, max(1, config.sums_resident * processors // strips))


def arguments(
    problem: Any,
    inputs: Tensors,
    outputs: Tensors,
    access: Access,
    row_parts: torch.Tensor,
    column_parts: torch.Tensor,
) -> bytes:
    """Make the struct of norm_tiles.cuh."""
    maps = [tiles.codes_map(inputs[name], access) for name in INPUTS]
    stream = tiles.bf16_map(inputs.get("dsum"), access)
    matrices = [tiles.matrix(inputs, name) for name in INPUTS]
    rest = struct.pack(
        "<14Qq3i",
        *(address(inputs.get(name)) for name in ("weight", "mean", "rstd")),
        address(row_parts),
        address(column_parts),
        *(address(inputs.get(name)) for name in ("seed", "dsum")),
        *(address(outputs.get(name)) for name in ("dx", "q", "scale", "qt", "scale_t")),
        *(address(outputs.get(name)) for name in ("dweight", "dbias")),
        inputs["dsum"].stride(0) if "dsum" in inputs else 0,
        problem.m,
        problem.n,
        len(column_parts),
    )
    return b"".join((*maps, stream, *matrices, rest)).ljust(ARGUMENT_BYTES, b"\0")
