"""Training steps and blocks measured against torch's own, and their kernels tuned."""
