"""Jetfire: a workbench for low-precision transformer-training kernels."""

__version__ = "0.1.0"
