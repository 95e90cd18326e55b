"""CUDA C++ kernels: one folder an op, each with a `KERNELS` tuple."""
