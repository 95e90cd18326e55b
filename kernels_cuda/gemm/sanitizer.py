"""Reports of compute-sanitizer on the CUDA GEMMs that are no fault."""

import re

from jetfire.core.sanitizer import Known

_FACTORS = (
    "A warp writes factors, meets in __syncwarp, and one lane arrives at the slot's barrier for "
    "all; the readers' release likewise. The PTX memory model orders that; racecheck counts an "
    "arrival for its own lane alone. Where every lane arrives (tests/test_sanitizers.py) it has "
    "nothing to report."
)
KNOWN = (
    Known(
        "racecheck",
        "wgmma",
        re.compile(r"between Read access at Multiplier::read_factors\("),
        re.compile(r"and Write access at scale\("),
        _FACTORS,
    ),
    Known(
        "racecheck",
        "wgmma",
        re.compile(r"between Write access at scale\("),
        re.compile(r"and Read access at Multiplier::read_factors\("),
        _FACTORS,
    ),
)
