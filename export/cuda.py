"""CUDA kernels as readable CUDA C++: one file a config, its parameters fixed, with host code."""

from __future__ import annotations

from jetfire.export.library import Library
from jetfire.export.plan import Plan
from jetfire.ops.op import Kernel


def takes(kernel: Kernel) -> bool:
    """Whether there is host code for a kernel."""
    return False


def library(plan: Plan) -> Library:
    """Raises UsageError where there is no host code for the kernel."""
    raise NotImplementedError
