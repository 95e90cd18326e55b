"""Two 4-bit codes a byte: element 2j in the low nibble of byte j, 2j + 1 in the high one."""

from __future__ import annotations

import torch


def pack(wide: torch.Tensor) -> torch.Tensor:
    """Codes in [-8, 7] (int8, …×n, n even) as two's complement nibbles, int8 …×n/2."""
    return wide[..., 0::2] & 15 | wide[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes of `pack`'s result, int8 …×n."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).flatten(-2)
