"""What inputs at the ends of what they may be are drawn with (`Op.edges`), on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import torch


def throughout(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One of the values, throughout."""
    return torch.full_like(like, rng.choice(values), device="cpu")


def each(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """One of the values for each element."""
    choices = torch.tensor(values, dtype=torch.float64, device="cpu")
    drawn = torch.randint(len(values), like.shape, generator=generator(rng), device="cpu")
    return choices[drawn]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(62))


def step(rng: Random, usual: torch.Tensor) -> torch.Tensor:
    """A power of two, with which values may be ties; one that clips all or nothing; or no step."""
    size = float(usual)
    power = 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0
    ends = (power, power, size * 50, size / 50, 0.0, -1.0, math.nan, 2.0**-135)
    return throughout(rng, ends, usual)
