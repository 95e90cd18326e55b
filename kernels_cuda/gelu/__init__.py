"""GELU and its gradient in CUDA C++: configuration, legality and launch of tiles.cu."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jetfire.core.device import Device
from jetfire.core.kernel import Config, Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.driver import address

SOURCE = Path(__file__).parent / "tiles.cu"
TILE = 128  # rows and columns
PARTS = 16  # of a tile, of 32×32 codes


@dataclass(frozen=True)
class PartsConfig(Config):
    """Choices of who works on a tile.

    Attributes:
        warps: warps of a block; each has 16/warps of a tile's parts.
        stages: tiles in shared memory, of which one is being read.
        resident: blocks that an SM is to hold.
    """

    warps: int = 8
    stages: int = 2
    resident: int = 2


SPACE: dict[str, Sequence[Any]] = {
    "warps": (8, 16),
    "stages": (2, 3, 4),
    "resident": (1, 2, 3, 4, 5, 6),
}


@dataclass(frozen=True)
class Access:
    """Bytes per access to codes that are read, to those written and to their transpose."""

    codes: int
    q: int
    qt: int


def by_code(problem: Any) -> bool:
    """Return whether a code alone decides what is written for it, so that tables hold that."""
    return bool(problem.mode == "fwd" and problem.rounding == "nearest")


def shared_bytes(problem: Any, config: PartsConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    operands = 2 if problem.mode == "bwd" else 1
    tile = operands * (TILE * TILE + 4 * PARTS)
    tables = config.warps * 256 * (1 if by_code(problem) else 4)
    return tables + config.stages * tile + 2 * 4 * PARTS


def registers(problem: Any, config: PartsConfig) -> int:
    """Return the registers that a thread needs so that nothing spills, as audited on sm_90."""
    held = 1 if problem.out_block == 32 else PARTS // config.warps
    if by_code(problem):
        return 64 if held == 1 else 80
    return 80 if held == 1 else 128


def config_header(problem: Any, config: PartsConfig, access: Access) -> str:
    """Write the kernel's constants as a header."""
    constants: dict[str, bool | int] = {
        "WARPS": config.warps,
        "STAGES": config.stages,
        "RESIDENT": config.resident,
        "SHARED_BYTES": shared_bytes(problem, config),
        "BLOCK": problem.block,
        "OUT_BLOCK": problem.out_block,
        "BACKWARD": problem.mode == "bwd",
        "ERF": problem.approximate == "erf",
        "STOCHASTIC": problem.rounding == "stochastic",
        "WRITES_Q": problem.layout != "qt",
        "WRITES_QT": problem.layout != "q",
        "ACCESS": access.codes,
        "Q_ACCESS": access.q,
        "QT_ACCESS": access.qt,
    }
    return header(constants)


def _most(most: int, *places: int) -> int:
    """Return `most` bytes per access where they divide all sizes and places, else 1."""
    return 1 if any(place % most for place in places) else most


def accesses(problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None) -> Access:
    """Return the accesses of a launch; without tensors those of aligned, contiguous ones."""
    m, n = problem.m, problem.n
    read = [x for name in ("x", "dy") if (x := (inputs or {}).get(name)) is not None]
    places = [place for x in read for place in (x.data_ptr(), x.stride(0))]
    q = address((outputs or {}).get("q"))  # in place it is dy, whose alignment is any
    return Access(_most(16, n, *places), _most(8, n, q), _most(4, m))


@cache
def _function(text: str, device: Device, shared: int) -> driver.Function:
    """Load the kernel with this `config.cuh`; it is kept for ever, since graphs hold it."""
    assert device.capability is not None
    return driver.Function(_compiled(text, device.capability), SOURCE.stem, device.index, shared)


def _compiled(text: str, capability: tuple[int, int]) -> bytes:
    major, minor = capability
    return compile_cubin(SOURCE, text, f"sm_{major}{minor}")


class GeluTiles(Kernel):
    """GELU and its gradient, tiles of 128×128 codes walked by as many blocks as the device holds."""

    op = "gelu"
    name = "tiles"
    Config = PartsConfig
    candidate = True

    def legal(self, problem: Any, config: PartsConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (9, 0):
            return "needs sm_90 or newer, for the maximum of two half words"
        if (reason := driver.missing()) is not None:
            return reason
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        for name in ("m", "n"):
            if getattr(problem, name) > 2**30:
                return f"{name}={getattr(problem, name)}: expected at most 2^30"
        threads, each = 32 * config.warps, registers(problem, config)
        if config.resident * threads * each > 65536:
            return f"resident={config.resident}: {each} registers per thread do not fit"
        # The device keeps 1 KiB per block for itself.
        if config.resident * (shared_bytes(problem, config) + 1024) > device.shared_bytes + 1024:
            return f"resident={config.resident} stages={config.stages}: too much shared memory"
        return None

    def default(self, problem: Any, device: Device) -> PartsConfig:
        return PartsConfig(8, 2, 3) if by_code(problem) else PartsConfig(8, 2, 2)

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def cubin(
        self, problem: Any, config: PartsConfig, capability: tuple[int, int], access: Access
    ) -> Cubin:
        """Return the machine code for tensors of some alignment."""
        code = _compiled(config_header(problem, config, access), capability)
        return Cubin(SOURCE.stem, code, shared_bytes(problem, config), config.warps)

    def cubins(self, problem: Any, config: PartsConfig, capability: tuple[int, int]) -> list[Cubin]:
        return [self.cubin(problem, config, capability, accesses(problem))]

    def launch(self, problem: Any, config: PartsConfig, inputs: Tensors, outputs: Tensors) -> None:
        device = Device.of(inputs["x"])
        text = config_header(problem, config, accesses(problem, inputs, outputs))
        function = _function(text, device, shared_bytes(problem, config))
        tiles = ceil_div(problem.m, TILE) * ceil_div(problem.n, TILE)
        blocks = min(tiles, config.resident * driver.processors(device.index))
        content = arguments(problem, inputs, outputs)
        argument = driver.struct_argument(content, len(content))
        function(blocks, 32 * config.warps, (argument,))


def arguments(problem: Any, inputs: Tensors, outputs: Tensors) -> bytes:
    """Make the struct of tiles.cu."""
    matrices = [
        field
        for name in ("x", "dy")
        for field in (
            _matrix(inputs[name], inputs[f"{name}_scale"]) if name in inputs else (0, 0, 0, 0)
        )
    ]
    written = (address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t"))
    return struct.pack(
        "<2Q2q2Q2q5Q2i", *matrices, address(inputs.get("seed")), *written, problem.m, problem.n
    )


def _matrix(codes: Any, scales: Any) -> tuple[int, int, int, int]:
    return address(codes), address(scales), codes.stride(0), scales.stride(0)


KERNELS = (GeluTiles(),)
