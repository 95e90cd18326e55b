"""Groups of 32 neighbours that are packed as 4-bit codes: their sizes, and their transform."""

from __future__ import annotations

import triton
import triton.language as tl

# As in jetfire.reference.hadamard_pack: a group, and its bytes when packed.
GROUP = tl.constexpr(32)
BYTES = tl.constexpr(16)
MOST = tl.constexpr(7.0)


@triton.jit
def signed_hadamard():
    """Return the signs times the Hadamard matrix, int8 32×32: ±1 by the parity of i & j."""
    i = tl.arange(0, GROUP)[:, None]
    parity = i & tl.arange(0, GROUP)[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    parity ^= (i & (i >> 1)) ^ ((i >> 2) & (i >> 3))
    return (1 - 2 * (parity & 1)).to(tl.int8)
