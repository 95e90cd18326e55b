"""SwiGLU's elementwise part and its gradients in CUDA C++: configuration, legality, launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core.tensors import Tensors, names_of
from jetfire.kernels_cuda import tiles
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import PARTS, TILE, Access, PartsConfig, TilesKernel

SOURCE = Path(__file__).parent / "tiles.cu"
INPUTS = ("gate", "up", "dy")


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


class SwigluTiles(TilesKernel):
    """Both directions."""

    op = "swiglu"
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (8, 16),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3, 4),
    }

    def registers(self, problem: Any, config: PartsConfig) -> int:
        return 80 if problem.out_block == 32 or config.warps == PARTS else 128

    def shared_bytes(self, problem: Any, config: PartsConfig) -> int:
        stage = operands(problem) * (TILE * TILE + 4 * PARTS) + 8
        return config.stages * stage + config.warps * 4 * (256 + 4) + 2 * 4 * PARTS

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        m, n = problem.m, problem.n
        read = [n] if inputs is None else tiles.places(inputs, INPUTS)
        q = [n] if outputs is None else [n, *tiles.places(outputs, written(problem))]
        return Access(tiles.in_boxes(read), 1 if any(x % 8 for x in q) else 8, 1 if m % 4 else 4)

    def program(self, problem: Any, config: PartsConfig, access: Access) -> Program:
        shared = self.shared_bytes(problem, config)
        constants: dict[str, bool | int] = {
            "WARPS": config.warps,
            "STAGES": config.stages,
            "RESIDENT": config.resident,
            "SHARED_BYTES": shared,
            "BLOCK": problem.block,
            "OUT_BLOCK": problem.out_block,
            "BACKWARD": problem.mode == "bwd",
        }
        text = tiles.writes_header(problem, access, constants)
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
