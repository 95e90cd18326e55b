"""The INT4 GEMM in CUDA C++."""

from __future__ import annotations

from jetfire.ops.op import Kernel

KERNELS: tuple[Kernel, ...] = ()
