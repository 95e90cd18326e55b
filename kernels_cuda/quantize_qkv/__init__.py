"""Quantisation of three matrices of bf16 side by side in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetfire.kernels_cuda.bf16_tiles import Bf16Tiles
from jetfire.kernels_cuda.tiles import TILE


class QuantizeQkvTiles(Bf16Tiles):
    """Matrices whose tiles each lie in one of them."""

    op = "quantize_qkv"
    source = Path(__file__).parent / "tiles.cu"
    names = ("query", "key", "value")

    def refused(self, problem: Any) -> str | None:
        if problem.n % TILE:
            return f"n={problem.n}: expected a multiple of {TILE}"
        if problem.n > 2**28:
            return f"n={problem.n}: expected at most 2^28"
        return super().refused(problem)


KERNELS = (QuantizeQkvTiles(),)
