"""LayerNorm's gradient in CUDA C++, for sm_90 and later."""

from __future__ import annotations

from pathlib import Path

from jetfire.kernels_cuda.norm_tiles import NormTiles

FOLDER = Path(__file__).parent


class LayerNormTiles(NormTiles):
    op = "layernorm"
    sources = (FOLDER / "sums.cu", FOLDER / "gradient.cu")
    sums = ("dweight", "dbias")


KERNELS = (LayerNormTiles(),)
