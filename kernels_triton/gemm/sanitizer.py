"""Reports of compute-sanitizer on the Triton GEMMs that are no fault."""

import re

from jetfire.core.sanitizer import Known

KNOWN = (
    Known(
        "racecheck",
        "gluon",
        re.compile(r"between Read access at gemm_kernel\+0x[0-9a-f]{1,3} in "),
        re.compile(r"and Write access at gemm_kernel\+"),
        "What reads is among the function's first instructions: the dispatch by which Triton's "
        "compiler hands partitions and what they capture to warps. No code of the kernel.",
    ),
)
