"""The linear layer in 4 bits, from its ops' own kernels."""

from jetfire.kernels_cuda.hadamard_gemm.staged import Staged

KERNELS = (Staged(),)
