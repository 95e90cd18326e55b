"""The Hadamard quantiser and its gradient in CUDA C++, for sm_80 and later."""

from __future__ import annotations

from jetfire.kernels_cuda.hadamard_quantize.rows import RowsHadamardQuantize

KERNELS = (RowsHadamardQuantize(),)
