"""Reports of compute-sanitizer that are no fault.

A kernel's folder names them in `KNOWN` of its module ``sanitizer``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
# The beginning of a report's next counterpart.
_COUNTERPART = re.compile(r"(?=\band \w+ access at )")


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
