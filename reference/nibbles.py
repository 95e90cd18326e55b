"""4-bit codes in bytes, packed or wide.

Packed, byte j has element 2j in its low nibble and 2j + 1 in the high one. A wide code is alone in
the high nibble of a byte whose low one is 0, so that the byte is sixteen times the code.
"""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes in [-8, 7] (int8, …×n, n even) as two's complement nibbles, int8 …×n/2."""
    return codes[..., 0::2] & 15 | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of `pack`'s result, int8 …×n."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).flatten(-2)


def widen(codes: torch.Tensor) -> torch.Tensor:
    """Return codes in [-8, 7], int8, as wide ones."""
    return codes << 4


def narrow(wide: torch.Tensor) -> torch.Tensor:
    """Return the codes of wide ones, int8."""
    return wide >> 4
