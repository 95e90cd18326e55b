"""Random problems, configs, layouts and values against the reference; failures are made small.

What runs cases is imported when it is asked for: importing this package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetfire.fuzz.example import Example, Failure, Outcome
    from jetfire.fuzz.search import PairReport, fuzz_kernel
    from jetfire.fuzz.worker import Executor, InProcess, Isolated

__all__ = [
    "Example",
    "Executor",
    "Failure",
    "InProcess",
    "Isolated",
    "Outcome",
    "PairReport",
    "fuzz_kernel",
]
_IN = {
    "example": ("Example", "Failure", "Outcome"),
    "search": ("PairReport", "fuzz_kernel"),
    "worker": ("Executor", "InProcess", "Isolated"),
}


def __getattr__(name: str) -> Any:
    for module, names in _IN.items():
        if name in names:
            return getattr(importlib.import_module(f"jetfire.fuzz.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
