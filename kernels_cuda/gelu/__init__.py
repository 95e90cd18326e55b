"""GELU and its gradient in CUDA C++: configuration, legality and launch of tiles.cu.

Instructions issued per element from blocks of 32 to blocks of 128, counted in the loop over tiles
as compiled for sm_90 (Triton's kernel of one tile per program has 13 in the first case): forward,
to nearest, 8.7 for codes and 9.3 for their transpose; backward, stochastic, both, 19.4, of which
random bits are 5.6. An H200 issues one per element of 8192×4096 in 1.13 µs at 1.755 GHz; its memory
takes 15.8 µs forward and 31.6 backward. Measured there: 20.8, 21.9 and 42.1 µs, where Triton's
kernel takes 31.8, 35.4 and 56.7.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetfire.core.device import Device
from jetfire.core.kernel import Config, Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.driver import address

if TYPE_CHECKING:
    import torch

SOURCE = Path(__file__).parent / "tiles.cu"
TILE = 128  # rows and columns
PARTS = 16  # of a tile, of 32×32 codes
ARGUMENT_BYTES = 384  # of a struct that is aligned to 64


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
    """How codes go to and from memory.

    Attributes:
        tma: those that are read come in boxes, by the tensor memory accelerator.
        q, qt: bytes per access to those that are written, and to their transpose.
    """

    tma: bool
    q: int
    qt: int


def by_code(problem: Any) -> bool:
    """Return whether a code alone decides what is written for it, so that tables hold that."""
    return bool(problem.mode == "fwd" and problem.rounding == "nearest")


def shared_bytes(problem: Any, config: PartsConfig) -> int:
    """Return a block's shared memory in bytes; the source asserts that it counts the same."""
    operands = 2 if problem.mode == "bwd" else 1
    stage = operands * (TILE * TILE + 4 * PARTS) + 8
    table = 256 if by_code(problem) else 4 * (256 + 4)
    return config.stages * stage + config.warps * table + 2 * 4 * PARTS


def registers(problem: Any, config: PartsConfig) -> int:
    """Return the registers that a thread needs so that nothing spills, as audited on sm_90."""
    if by_code(problem):
        return 64
    return 80 if problem.out_block == 32 or config.warps == PARTS else 128


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
        "TMA": access.tma,
        "Q_ACCESS": access.q,
        "QT_ACCESS": access.qt,
    }
    return header(constants)


def accesses(problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None) -> Access:
    """Return the accesses of a launch; without tensors those of aligned, contiguous ones."""
    m, n = problem.m, problem.n
    places = [n]
    if inputs is not None:
        read = [inputs[name] for name in ("x", "dy") if name in inputs]
        places = [place for x in read for place in (x.data_ptr(), x.stride(0))]
    q = address((outputs or {}).get("q"))  # in place it is dy, whose alignment is any
    tma = not any(place % 16 or place == 0 for place in places)
    return Access(tma, 1 if n % 8 or q % 8 else 8, 1 if m % 4 else 4)


@cache
def _function(text: str, device: Device, shared: int) -> driver.Function:
    """Load the kernel with this `config.cuh`; it is kept for ever, since graphs hold it."""
    assert device.capability is not None
    return driver.Function(_compiled(text, device.capability), SOURCE.stem, device.index, shared)


def _compiled(text: str, capability: tuple[int, int]) -> bytes:
    major, minor = capability
    return compile_cubin(SOURCE, text, f"sm_{major}{minor}")


class GeluTiles(Kernel):
    """Both directions, for blocks of the grid that go over tiles of 128×128 codes."""

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
        """Return two tiles per block, and as many blocks as the registers of an SM allow."""
        config = PartsConfig(8, 2, 1)
        resident = 65536 // (32 * config.warps * registers(problem, config))
        return dataclasses.replace(config, resident=resident)

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
        access = accesses(problem, inputs, outputs)
        text = config_header(problem, config, access)
        function = _function(text, device, shared_bytes(problem, config))
        tiles = ceil_div(problem.m, TILE) * ceil_div(problem.n, TILE)
        blocks = min(tiles, config.resident * driver.processors(device.index))
        content = arguments(problem, inputs, outputs, access)
        argument = driver.struct_argument(content, len(content))
        function(blocks, 32 * config.warps, (argument,))


def arguments(problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
    """Make the struct of tiles.cu."""
    names = ("x", "dy")
    maps = b"".join(_map(problem, inputs.get(name), access) for name in names)
    matrices = (field for name in names for field in _matrix(inputs, name))
    written = (address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t"))
    seed = address(inputs.get("seed"))
    content = struct.pack("<2Q2q2Q2q5Q2i", *matrices, seed, *written, problem.m, problem.n)
    return (maps + content).ljust(ARGUMENT_BYTES, b"\0")


def _map(problem: Any, codes: torch.Tensor | None, access: Access) -> bytes:
    if codes is None or not access.tma:
        return driver.NO_MAP
    place = codes.data_ptr()
    return driver.tensor_map(place, "int8", problem.m, problem.n, codes.stride(0), TILE, TILE)


def _matrix(inputs: Tensors, name: str) -> tuple[int, int, int, int]:
    if name not in inputs:
        return 0, 0, 0, 0
    codes, scales = inputs[name], inputs[f"{name}_scale"]
    return address(codes), address(scales), codes.stride(0), scales.stride(0)


KERNELS = (GeluTiles(),)
