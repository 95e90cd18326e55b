"""Random problems, configs, layouts and values against the reference; failures are made small."""

from jetfire.fuzz.case import Case, Failure, Outcome
from jetfire.fuzz.search import Report, fuzz_kernel
from jetfire.fuzz.worker import Executor, InProcess, Isolated, load

__all__ = [
    "Case", "Executor", "Failure", "InProcess", "Isolated", "Outcome", "Report", "fuzz_kernel",
    "load",
]  # fmt: skip
