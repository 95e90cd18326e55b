"""CPU kernels, made of torch operations: one folder per op, each with a `KERNELS` tuple."""
