"""Quantisation of bf16 in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from pathlib import Path

from jetfire.kernels_cuda.bf16_tiles import Bf16Tiles


class QuantizeTiles(Bf16Tiles):
    op = "quantize"
    source = Path(__file__).parent / "tiles.cu"
    names = ("x",)


KERNELS = (QuantizeTiles(),)
