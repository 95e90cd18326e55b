"""GELU and its gradient in CUDA C++: configuration, legality and launch of tiles.cu.

Instructions issued per element from blocks of 32 to blocks of 128, counted in the loop over tiles
as compiled for sm_90 (Triton's kernel of one tile per program has 13 in the first case): forward,
to nearest, 8.7 for codes and 9.3 for their transpose; backward, stochastic, both, 19.4, of which
random bits are 5.6. An H200 issues one per element of 8192×4096 in 1.13 µs at 1.755 GHz; its memory
takes 15.8 µs forward and 31.6 backward. Measured there: 20.8, 21.9 and 42.1 µs, where Triton's
kernel takes 31.8, 35.4 and 56.7.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from jetfire.core.tensors import Tensors
from jetfire.kernels_cuda import tiles
from jetfire.kernels_cuda.driver import address
from jetfire.kernels_cuda.program import Program
from jetfire.kernels_cuda.tiles import PARTS, TILE, Access, PartsConfig, TilesKernel

SOURCE = Path(__file__).parent / "tiles.cu"
ARGUMENT_BYTES = 384  # of a struct that is aligned to 64
INPUTS = ("x", "dy")


def by_code(problem: Any) -> bool:
    """Return whether a code alone decides what is written for it, so that tables hold that."""
    return bool(problem.mode == "fwd" and problem.rounding == "nearest")


class GeluTiles(TilesKernel):
    """Both directions."""

    op = "gelu"
    needs = "needs sm_90 or newer, for the maximum of two half words"
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (8, 16),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3, 4, 5, 6),
    }

    def registers(self, problem: Any, config: PartsConfig) -> int:
        if by_code(problem):
            return 64
        return 80 if problem.out_block == 32 or config.warps == PARTS else 128

    def shared_bytes(self, problem: Any, config: PartsConfig) -> int:
        operands = 2 if problem.mode == "bwd" else 1
        stage = operands * (TILE * TILE + 4 * PARTS) + 8
        table = 256 if by_code(problem) else 4 * (256 + 4)
        return config.stages * stage + config.warps * table + 2 * 4 * PARTS

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        places = [problem.n] if inputs is None else tiles.places(inputs, INPUTS)
        return Access(tiles.in_boxes(places), *tiles.write_access(problem.m, problem.n, outputs))

    def program(self, problem: Any, config: PartsConfig, access: Access) -> Program:
        shared = self.shared_bytes(problem, config)
        own = {"BACKWARD": problem.mode == "bwd", "ERF": problem.approximate == "erf"}
        text = tiles.writes_header(problem, config, shared, access, own)
        return Program(SOURCE, text, shared, config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        maps = (tiles.codes_map(inputs.get(name), access) for name in INPUTS)
        matrices = (tiles.matrix(inputs, name) for name in INPUTS)
        written = (address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t"))
        rest = struct.pack("<5Q2i", address(inputs.get("seed")), *written, problem.m, problem.n)
        return b"".join((*maps, *matrices, rest)).ljust(ARGUMENT_BYTES, b"\0")


KERNELS = (GeluTiles(),)
