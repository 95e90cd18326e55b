"""CUDA C++ kernels: one folder per op, each with a `KERNELS` tuple."""
