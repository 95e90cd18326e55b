"""Reports of compute-sanitizer on the fallback GEMM that are no fault."""

from jetfire.kernels_cuda.sanitizer import READERS, WRITERS, factors

# A slot's mark is written and read with its factors.
KNOWN = factors(rf"({READERS}|Multiplier::multiply\(|mark\()", rf"({WRITERS}|mark\()")
