"""Timing kernels against their peers, after checking them."""
