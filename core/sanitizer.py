"""What of a compute-sanitizer's reports is no fault: a kernel's folder says it.

Its module ``sanitizer`` has them in `KNOWN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
# Where a report's next counterpart begins.
_COUNTERPART = re.compile(r"(?=\band \w+ access at )")


@dataclass(frozen=True)
class Known:
    """Reports that are no fault: of two accesses, or of one and several counterparts.

    Attributes:
        access: what one of them says first.
        counterpart: how each of its counterparts begins.
        reason: why.
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
