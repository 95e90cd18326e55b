"""Quantisation of bf16 in CUDA C++: configuration, legality and launch of bf16_tiles.cuh.

Instructions issued per element to blocks of 128, counted in the loop over tiles as compiled for
sm_90: to nearest 8 for codes and 10 for both them and their transpose; stochastic 16 for both. An
H200 issues one per element of 8192×3072 in 0.84 µs at 1.755 GHz; its memory takes 24 µs for both.
On an H100, 8192×1024 to codes both ways takes 13.3 µs stochastically where Triton's kernel takes
15.7; to nearest, and of larger matrices, both take the same within 7%.
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


class Bf16Tiles(TilesKernel):
    """bf16 to codes, in any layout and rounding.

    Attributes:
        source: it says how many matrices stand side by side.
        names: theirs.
    """

    source: ClassVar[Path]
    names: ClassVar[tuple[str, ...]]
    choices: ClassVar[dict[str, Sequence[Any]]] = {
        "warps": (8, 16),
        "stages": (2, 3, 4),
        "resident": (1, 2, 3, 4),
    }

    def refused(self, problem: Any) -> str | None:
        if problem.dtype != "bf16":
            return f"dtype={problem.dtype}: expected bf16"
        return None

    def registers(self, problem: Any, config: PartsConfig) -> int:
        return 64 if config.warps == PARTS else 80

    def shared_bytes(self, problem: Any, config: PartsConfig) -> int:
        return config.stages * (2 * TILE * TILE + 8) + 4 * PARTS

    def columns(self, problem: Any) -> int:
        """Return the columns of all matrices together."""
        return len(self.names) * int(problem.n)

    def blocks(self, problem: Any, config: PartsConfig, processors: int) -> int:
        total = tiles.count(problem.m, self.columns(problem))
        return min(total, config.resident * processors)

    def accesses(
        self, problem: Any, inputs: Tensors | None = None, outputs: Tensors | None = None
    ) -> Access:
        places = [2 * problem.n] if inputs is None else tiles.places(inputs, self.names)
        tma = tiles.in_boxes(places)
        q, qt = tiles.write_access(problem.m, self.columns(problem), outputs)
        return Access(tma, q, qt, 16 if tma else 2)

    def program(self, problem: Any, config: PartsConfig, access: Access) -> Program:
        shared = self.shared_bytes(problem, config)
        text = tiles.writes_header(problem, config, shared, access)
        return Program(self.source, text, shared, config.warps)

    def arguments(self, problem: Any, inputs: Tensors, outputs: Tensors, access: Access) -> bytes:
        matrices = [inputs[name] for name in self.names]
        maps = b"".join(tiles.bf16_map(x, access) for x in matrices)
        rest = struct.pack(
            f"<{len(matrices)}Q{len(matrices)}q5Q3i",
            *(address(x) for x in matrices),
            *(x.stride(0) for x in matrices),
            address(inputs.get("seed")),
            *(address(outputs.get(name)) for name in ("q", "scale", "qt", "scale_t")),
            problem.m,
            self.columns(problem),
            problem.n,
        )
        return tiles.aligned(maps + rest)
