"""The sanitizers of kernels: compute-sanitizer's, whose known reports are no fault, and Triton's.

A kernel's folder names such reports in `KNOWN` of its module ``sanitizer``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck", "consan"]
INSTRUMENTATION = "TRITON_INSTRUMENTATION_MODE"
# The beginning of a report's next counterpart.
_COUNTERPART = re.compile(r"(?=\band \w+ access at )")


def under_consan() -> bool:
    """Return whether Triton has its concurrency sanitizer in what this process compiles."""
    return os.environ.get(INSTRUMENTATION) == "consan"


@dataclass(frozen=True)
class Known:
    """Reports that are no fault, on an access and one or several counterparts.

    Attributes:
        access: matches a report's first part, on the access.
        counterpart: matches the beginning of each counterpart.
        reason: why this is no fault.
    """

    tool: Tool
    kernel: str
    access: re.Pattern[str]
    counterpart: re.Pattern[str]
    reason: str

    def matches(self, report: str) -> bool:
        first, *others = _COUNTERPART.split(report)
        return (
            self.access.search(first) is not None
            and len(others) > 0
            and all(self.counterpart.match(other) for other in others)
        )
