"""Reports of compute-sanitizer on products by blocks that are no fault."""

import re

from jetfire.core.sanitizer import Known

_FACTORS = (
    "A warp writes factors, meets in __syncwarp, and one lane arrives at the slot's barrier for "
    "all; the readers' release likewise. The PTX memory model orders that; racecheck counts an "
    "arrival for its own lane alone. Where every lane arrives (tests/test_sanitizers.py) it has "
    "nothing to report."
)
READERS = r"(Multiplier|Interleaved)::read_factors\("
WRITERS = r"(scale|give_factors)\("


def factors(readers: str, writers: str) -> tuple[Known, ...]:
    """Return both orders of a read and a write of a slot's factors, by the functions' names."""
    read, write = rf"Read access at {readers}", rf"Write access at {writers}"
    orders = (read, write), (write, read)
    return tuple(
        Known("racecheck", "wgmma", re.compile(rf"between {a}"), re.compile(rf"and {b}"), _FACTORS)
        for a, b in orders
    )
