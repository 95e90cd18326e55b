"""Any kernel as compiled code: a C file with the cubins and a launcher of the driver API."""

from __future__ import annotations

from jetfire.export.library import Library
from jetfire.export.plan import Plan


def library(plan: Plan) -> Library:
    """Compile every launch of every problem, and describe it in C."""
    raise NotImplementedError
