"""Reports of compute-sanitizer on the Triton GEMMs that are no fault."""

import re
from pathlib import Path

from jetfire.core.sanitizer import Known

_LINES = Path(__file__).with_name("mainloop.py").read_text(encoding="utf-8").splitlines()


def _access(kind: str, code: str) -> str:
    """Match a read or write by the one line of the main loop that has this code."""
    (line,) = (number for number, text in enumerate(_LINES, 1) if code in text)
    return rf"{kind} access at gemm_kernel\+0x[0-9a-f]+ in mainloop\.py:{line}\b"


_READ = _access("Read", "rows.slice(col")
_WRITE = _access("Write", ".store(products[i])")
_SCALES = (
    "The producer's warp writes a slot's scales, meets in bar.warp.sync, and one lane arrives at "
    "the slot's barrier for all. The PTX memory model orders that; racecheck counts an arrival "
    "for its own lane alone, as it does for the CUDA kernel."
)

KNOWN = (
    Known(
        "racecheck",
        "gluon",
        re.compile(r"between Read access at gemm_kernel\+0x[0-9a-f]{1,3} in "),
        re.compile(r"and Write access at gemm_kernel\+"),
        "What reads is among the function's first instructions: the dispatch by which Triton's "
        "compiler hands partitions and what they capture to warps. No code of the kernel.",
    ),
    *(
        Known("racecheck", "gluon", re.compile(f"between {a}"), re.compile(f"and {b}"), _SCALES)
        for a, b in ((_READ, _WRITE), (_WRITE, _READ))
    ),
)
