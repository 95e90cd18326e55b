"""The norms' gradient in CUDA C++: configuration, legality and both launches of it.

norm_sums.cuh adds up over rows and columns, norm_gradient.cuh writes the gradient. Instructions
issued per element from blocks of 32 to blocks of 128, stochastic, layout both, counted in the loops
as compiled for sm_90: sums 15 (RMSNorm's 11); gradient 21, with the residual stream 27. An H200
issues one per element of 8192×1024 in 0.28 µs at 1.755 GHz; its memory takes 4 µs for the first
launch, 8 for the second and 15.8 with the stream.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jetfire.core.device import Device
from jetfire.core.kernel import Config, Kernel
from jetfire.core.machine_code import Cubin
from jetfire.core.tensors import Tensors, ceil_div
from jetfire.kernels_cuda import driver
from jetfire.kernels_cuda.compile import compile_cubin, header
from jetfire.kernels_cuda.driver import address

if TYPE_CHECKING:
    import torch

TILE = 128  # rows and columns
PARTS = 16  # of a tile, of 32×32 codes
STREAM_COLUMNS = 64  # of a box of bf16, whose rows have at most 128 bytes
ARGUMENT_BYTES = 640  # of a struct that is aligned to 64
Launch = Literal["sums", "gradient"]
# The launches in their order, and what their fields of a config begin with.
PREFIXES: dict[Launch, str] = {"sums": "sums_", "gradient": ""}


@dataclass(frozen=True)
class NormTilesConfig(Config):
    """Choices of who works on a tile.

    Attributes:
        warps: warps of a block; each has 16/warps of a tile's parts.
        stages: tiles in shared memory, of which one is being read.
        resident: blocks that an SM is to hold.
        sums_stages, sums_resident: the same of the launch that adds up.
    """

    warps: int = 8
    stages: int = 2
    resident: int = 2
    sums_stages: int = 2
    sums_resident: int = 2


SPACE: dict[str, Sequence[Any]] = {
    "warps": (8, 16),
    "stages": (2, 3, 4),
    "resident": (1, 2, 3),
    "sums_stages": (2, 3, 4),
    "sums_resident": (1, 2, 3),
}


@dataclass(frozen=True)
class Access:
    """How numbers go to and from memory.

    Attributes:
        tma: codes that are read come in boxes, by the tensor memory accelerator.
        stream: bytes per access to the residual stream's gradients.
        q, qt: bytes per access to codes that are written, and to their transpose.
    """

    tma: bool
    stream: int
    q: int
    qt: int


WORDS = Access(tma=True, stream=16, q=8, qt=4)


def residual(problem: Any) -> bool:
    """Return whether the gradient joins that of the residual stream."""
    return bool(getattr(problem, "residual", False))


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
    if residual(problem):  # its values are bf16
        return 80 if problem.layout == "both" and problem.rounding == "stochastic" else 128
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
    constants: dict[str, bool | int] = {
        "WARPS": config.warps,
        "STAGES": config.stages,
        "RESIDENT": resident,
        "SHARED_BYTES": shared_bytes("gradient", config, sums),
        "BLOCK": problem.block,
        "OUT_BLOCK": problem.out_block,
        "RESIDUAL": residual(problem),
        "STOCHASTIC": problem.rounding == "stochastic",
        "WRITES_Q": problem.layout != "qt",
        "WRITES_QT": problem.layout != "q",
        "WHOLE_LANES": problem.n % 8 == 0,
        "TMA": access.tma,
        "STREAM_ACCESS": access.stream,
        "Q_ACCESS": access.q,
        "QT_ACCESS": access.qt,
    }
    return header(constants)


def accesses(problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None) -> Access:
    """Return the accesses of a launch; without tensors those of aligned, contiguous ones."""
    m, n = problem.m, problem.n
    places, streams = [n], [2 * n]
    if inputs is not None:
        places = [place for k in ("x", "dy") for place in (inputs[k].data_ptr(), _pitch(inputs, k))]
    if inputs is not None and "dsum" in inputs:
        streams += [inputs["dsum"].data_ptr(), _pitch(inputs, "dsum")]
        streams.append(address((outputs or {}).get("dx")))
    q = address((outputs or {}).get("q"))  # in place it is dy, whose alignment is any
    tma = not any(place % 16 or place == 0 for place in places)
    stream = 2 if any(place % 16 for place in streams) else 16
    return Access(tma, stream, 1 if n % 8 or q % 8 else 8, 1 if m % 4 else 4)


def _pitch(inputs: Tensors, name: str) -> int:
    """Return the bytes from row to row."""
    return inputs[name].stride(0) * inputs[name].element_size()


@cache
def _function(source: Path, text: str, device: Device, shared: int) -> driver.Function:
    """Load a kernel with this `config.cuh`; it is kept for ever, since graphs hold it."""
    assert device.capability is not None
    code = _compiled(source, text, device.capability)
    return driver.Function(code, source.stem, device.index, shared)


def _compiled(source: Path, text: str, capability: tuple[int, int]) -> bytes:
    major, minor = capability
    return compile_cubin(source, text, f"sm_{major}{minor}")


class NormTiles(Kernel):
    """A norm's gradient, for blocks of the grid that go over tiles of 128×128 codes, twice.

    Attributes:
        sources: of the launch that adds up, and of the one that writes the gradient.
        sums: the op's outputs that are sums over rows.
    """

    name = "tiles"
    Config = NormTilesConfig
    candidate = True
    sources: ClassVar[tuple[Path, Path]]
    sums: ClassVar[tuple[str, ...]]

    def legal(self, problem: Any, config: NormTilesConfig, device: Device) -> str | None:
        if device.kind != "cuda" or (device.capability or (0, 0)) < (9, 0):
            return "needs sm_90 or newer, for the tensor memory accelerator"
        if (reason := driver.missing()) is not None:
            return reason
        if problem.mode != "bwd":
            return "mode=fwd: expected bwd"
        for name, values in SPACE.items():
            if getattr(config, name) not in values:
                return f"{name}={getattr(config, name)}: expected one of {values}"
        for name in ("m", "n"):
            if getattr(problem, name) > 2**30:
                return f"{name}={getattr(problem, name)}: expected at most 2^30"
        for launch, prefix in PREFIXES.items():
            resident = getattr(config, f"{prefix}resident")
            each = registers(launch, problem, config)
            if resident * 32 * config.warps * each > 65536:
                return f"{prefix}resident={resident}: {each} registers per thread do not fit"
            # The device keeps 1 KiB per block for itself.
            shared = shared_bytes(launch, config, len(self.sums)) + 1024
            if resident * shared > device.shared_bytes + 1024:
                stages = getattr(config, f"{prefix}stages")
                return (
                    f"{prefix}resident={resident} {prefix}stages={stages}: too much shared memory"
                )
        return None

    def default(self, problem: Any, device: Device) -> NormTilesConfig:
        """Return two tiles per block, and as many blocks as the registers of an SM allow."""
        config = NormTilesConfig()
        threads = 32 * config.warps
        return dataclasses.replace(
            config,
            resident=min(3, 65536 // (threads * registers("gradient", problem, config))),
            sums_resident=min(3, 65536 // (threads * registers("sums", problem, config))),
        )

    def space(self, problem: Any, device: Device) -> dict[str, Sequence[Any]]:
        return SPACE

    def cubin(
        self,
        launch: Launch,
        problem: Any,
        config: NormTilesConfig,
        capability: tuple[int, int],
        access: Access,
    ) -> Cubin:
        """Return the machine code of a launch for tensors of some alignment."""
        source, text, shared = self.programs(problem, config, access)[launch]
        return Cubin(source.stem, _compiled(source, text, capability), shared, config.warps)

    def cubins(
        self, problem: Any, config: NormTilesConfig, capability: tuple[int, int]
    ) -> list[Cubin]:
        access = accesses(problem)
        return [self.cubin(each, problem, config, capability, access) for each in PREFIXES]

    def programs(
        self, problem: Any, config: NormTilesConfig, access: Access
    ) -> dict[Launch, tuple[Path, str, int]]:
        """Return each launch's source, constants and shared memory."""
        given = problem, config, access, len(self.sums)
        texts = sums_header(*given), gradient_header(*given)
        return {
            launch: (source, text, shared_bytes(launch, config, len(self.sums)))
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
        argument = driver.struct_argument(content, len(content))
        blocks = each * strips, min(strips * down, config.resident * processors)
        programs = self.programs(problem, config, access).values()
        for count, (source, text, shared) in zip(blocks, programs, strict=True):
            function = _function(source, text, device, shared)
            function(count, 32 * config.warps, (argument,))


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
    codes = ("x", "dy")
    maps = [_map(problem, inputs[name], access) for name in codes]
    content = struct.pack(
        "<2Q2q2Q2q14Qq3i",
        *(field for name in codes for field in _matrix(inputs, name)),
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
    stream = _stream_map(problem, inputs.get("dsum"), access)
    return (b"".join((*maps, stream)) + content).ljust(ARGUMENT_BYTES, b"\0")


def _map(problem: Any, codes: torch.Tensor, access: Access) -> bytes:
    if not access.tma:
        return driver.NO_MAP
    place = codes.data_ptr()
    return driver.tensor_map(place, "int8", problem.m, problem.n, codes.stride(0), TILE, TILE)


def _stream_map(problem: Any, dsum: torch.Tensor | None, access: Access) -> bytes:
    if dsum is None or access.stream != 16:
        return driver.NO_MAP
    shape = problem.m, problem.n, 2 * dsum.stride(0)
    return driver.tensor_map(dsum.data_ptr(), "bf16", *shape, TILE, STREAM_COLUMNS)


def _matrix(inputs: Tensors, name: str) -> tuple[int, int, int, int]:
    codes, scales = inputs[name], inputs[f"{name}_scale"]
    return address(codes), address(scales), codes.stride(0), scales.stride(0)
