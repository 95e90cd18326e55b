"""CPU kernels, made of torch operations: one folder an op, each with a `KERNELS` tuple."""
