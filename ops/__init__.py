"""Operations: each pairs a reference with its kernels.

The functions that a model calls (`int8_gemm`, `int4_quantize`, …) are found here. Importing this
package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from jetfire.core import registry


def __getattr__(name: str) -> Any:
    # Not cross_entropy and int4_gemm, which here are their ops' modules: `functional` has them.
    if name.startswith(("int8_", "int4_")) and name not in registry.names():
        return getattr(importlib.import_module("jetfire.ops.functional"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
