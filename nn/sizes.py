"""What sizes a block may have, said without torch: a command refuses others before it is loaded."""

from __future__ import annotations

from jetfire.core.errors import UsageError


def check_llama(
    width: int, heads: int, kv_heads: int, hidden: int, block: int = 1, flow: int = 1
) -> None:
    """Check the sizes of a block of Llama's, multiplied in blocks of `block`, 1 in BF16.

    Layers that read the same input stand under one another in one product, so each has whole
    blocks; the MLP's also of what flows between products.

    Raises:
        UsageError: a size is not a multiple of what it must be.
    """
    if heads < 1 or width % heads or width // heads % 2:
        raise UsageError(f"width={width}: expected heads={heads} times an even number")
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"kv_heads={kv_heads}: expected a divisor of heads={heads}")
    of_kv = width // heads * kv_heads
    sides = {"width": (width, block), "keys": (of_kv, block), "hidden": (hidden, max(block, flow))}
    for name, (size, side) in sides.items():
        if size < 1 or size % side:
            raise UsageError(f"{name} of {size}: expected a multiple of {side}")
