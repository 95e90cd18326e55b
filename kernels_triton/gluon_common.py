"""Functions that the Gluon kernels share, as those in `common` are shared by the Triton ones."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetfire.kernels_triton.common import ROUNDS


@gluon.jit
def max_nan(a, b):
    """Return the larger of two, NaN if either is."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def philox_words(seed, c0, c1, c2, c3):
    """Return Philox words at counters (c0, c1, c2, c3): [..., 2, 2] of words 0, 1, 2, 3.

    They are those of jetfire.reference.philox; nested joins keep the order of its `random_u16`.
    """
    key = seed.to(gl.uint64)
    k0, k1 = key.to(gl.uint32), (key >> 32).to(gl.uint32)
    for _ in gl.static_range(ROUNDS):
        product0 = c0.to(gl.uint64) * 0xD2511F53
        product1 = c2.to(gl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(gl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(gl.uint32) ^ c3 ^ k1
        c1 = product1.to(gl.uint32)
        c3 = product0.to(gl.uint32)
        k0 = gl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = gl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return gl.join(gl.join(c0, c2), gl.join(c1, c3))
