"""SwiGLU's elementwise part and its gradients in CUDA C++: configuration, legality, launch.

Instructions issued per element from blocks of 32 to blocks of 128, counted in the loop over tiles
as compiled for sm_90, of which some 1.5 fetch the next tile, by one or two warps: forward, to
nearest, 14.0 for codes and 15.6 for both them and their transpose; stochastic 19.5 and 21.1;
backward, stochastic, both, 40.6. Where silu is evaluated in place of a look-up 2.9 more. An H200
issues one per element of 8192×4096 in 1.13 µs at 1.755 GHz; its memory takes 23.7 µs forward for
codes, 31.6 for both and 55.3 backward for both. On an H100, 8192×11008 takes 94 µs forward and
177 backward for codes, where Triton's kernel takes 107 and 289.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core.tensors import Tensors, names_of
from jetfire.kernels_cuda import tiles
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import PARTS, TILE, Access, PartsConfig, TilesKernel

SOURCE = Path(__file__).parent / "tiles.cu"
INPUTS = ("gate", "up", "dy")
WORDS = Access(tma=True, q=8, qt=4)


def operands(problem: Any) -> int:
    """Return how many matrices are read."""
    return 3 if problem.mode == "bwd" else 2


def written(problem: Any) -> tuple[str, ...]:
    """Return the names of the codes that are written, in the order of the source's outputs."""
    return ("dgate", "dup") if problem.mode == "bwd" else ("q",)


def output(tensors: Tensors, name: str, m: int, n: int) -> bytes:
    """Make the struct Written of an output, zeros where there is none."""
    names = names_of(name)
    parts = (address(tensors.get(names[part])) for part in ("q", "scale", "qt", "scale_t"))
    rows = (tensors.get(names[part]) for part in ("q", "scale"))
    pitches = (0 if x is None else x.stride(0) for x in rows)
    return struct.pack("<4Q2q2i", *parts, *pitches, m, n)


@dataclass(frozen=True)
class SwigluConfig(PartsConfig):
    """Choices of who works on a tile, and how.

    Attributes:
        looked_up: silu is looked up in a table of its block's, else evaluated at each element.
    """

    looked_up: bool = True


class SwigluTiles(TilesKernel):
    """Both directions."""

    op = "swiglu"
    Config = SwigluConfig
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (8, 16),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3, 4),
        "looked_up": (True, False),
    }

    def registers(self, problem: Any, config: SwigluConfig) -> int:
        stochastic = problem.rounding == "stochastic"
        if config.warps == PARTS:
            return 80 if stochastic and (problem.mode == "bwd" or problem.out_block == 32) else 64
        if problem.out_block == 32:
            return 80 if config.looked_up or not stochastic else 96
        return 128

    def shared_bytes(self, problem: Any, config: SwigluConfig) -> int:
        stage = operands(problem) * (TILE * TILE + 4 * PARTS) + 8
        return config.stages * stage + config.warps * 4 * (256 + 4) + 2 * 4 * PARTS

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        m, n = problem.m, problem.n
        read = [n] if inputs is None else tiles.places(inputs, INPUTS)
        q = [n] if outputs is None else [n, *tiles.places(outputs, written(problem))]
        return Access(tiles.in_boxes(read), 1 if any(x % 8 for x in q) else 8, 1 if m % 4 else 4)

    def program(self, problem: Any, config: SwigluConfig, access: Access) -> Program:
        shared = self.shared_bytes(problem, config)
        # Addresses of bytes want registers.
        resident = config.resident if access == WORDS else 1
        own = {"BACKWARD": problem.mode == "bwd", "LOOKED_UP": config.looked_up}
        text = tiles.writes_header(problem, config, shared, access, own, resident)
        return Program(SOURCE, text, shared, config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        maps = (tiles.codes_map(inputs.get(name), access) for name in INPUTS)
        matrices = (tiles.matrix(inputs, name) for name in INPUTS)
        m, n = problem.m, problem.n
        names = (*written(problem), "")[:2]
        rows = (output(outputs, name, m, n) if name else bytes(56) for name in names)
        rest = struct.pack("<Q2i", address(inputs.get("seed")), m, n)
        return tiles.aligned(b"".join((*maps, *matrices, *rows, rest)))


KERNELS = (SwigluTiles(),)
