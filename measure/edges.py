"""Draws of extreme inputs, on the CPU (`Op.edges`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import torch


def throughout(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return one of the values, the same for all elements."""
    return torch.full_like(like, rng.choice(values), device="cpu")


def each(rng: Random, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return one of the values per element."""
    choices = torch.tensor(values, dtype=torch.float64, device="cpu")
    drawn = torch.randint(len(values), like.shape, generator=generator(rng), device="cpu")
    return choices[drawn]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(62))


def step(rng: Random, usual: torch.Tensor) -> torch.Tensor:
    """Return a power of two, so that values may be ties, a step that clips all or none, or none."""
    size = float(usual)
    power = 2.0 ** round(math.log2(size)) if 0 < size < math.inf else 1.0
    ends = (power, power, size * 50, size / 50, 0.0, -1.0, math.nan, 2.0**-135)
    return throughout(rng, ends, usual)
