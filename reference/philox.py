"""Philox4x32, the counter-based generator behind stochastic rounding and dropout.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
Seven rounds are the fewest that pass BigCrush (table 2); each costs two 32×32→64-bit products for
eight elements, which is what stochastic kernels on an H200 have to spare.
"""

from __future__ import annotations

import torch

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

# The fourth counter word keeps the uses of one seed apart.
STREAM_ROUNDING = 0
STREAM_DROPOUT = 1
STREAM_SAMPLING = 2
STREAM_SECOND = 3  # rounding of an op's second output
STREAM_PACKING = 4
STREAM_UNPACKING = 5


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low words of a·b for a in [2^31, 2^32) and b of 32 bits in int64.

    (a − 2^32)·b is what int64 holds; the rest of the product adds b to its high word.
    """
    product = (a - (1 << 32)) * b
    high = product >> 32
    high += b
    product &= _MASK
    return high, product


def philox4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[torch.Tensor, ...]:
    """Return four random 32-bit words for each counter.

    Args:
        counter: four int64 tensors, of shapes that broadcast, values in [0, 2^32).
        key: two ints in [0, 2^32).
        rounds: 7 here; 10 in the paper's recommendation.

    Returns:
        Four int64 tensors of the common shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_u16(
    seed: torch.Tensor, m: int, n: int, stream: int = STREAM_ROUNDING, row0: int = 0
) -> torch.Tensor:
    """Return sixteen random bits per element, for rows row0 … row0+m of an output with n columns.

    Element (i, j) takes half-word j mod 8 (low halves first) of the words at counter
    (j div 8, i, 0, stream): its bits depend on the seed and its place, on nothing else.

    Args:
        seed: int64, one element; its low and high words are the key.

    Returns:
        m×n int64 in [0, 65536), on the seed's device.
    """
    value = int(seed.item())
    groups = -(-n // 8)
    columns = torch.arange(groups, device=seed.device)[None]
    rows = torch.arange(row0, row0 + m, device=seed.device)[:, None]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seed.device)
    words = philox4x32((columns, rows, zero, zero + stream), (value & _MASK, (value >> 32) & _MASK))
    # Memory has a word's low half first.
    halves = torch.stack(words, dim=-1).int().view(torch.int16).long()
    halves &= 0xFFFF
    return halves.reshape(m, groups * 8)[:, :n]


def uniform(seed: torch.Tensor, m: int, n: int, stream: int = STREAM_ROUNDING) -> torch.Tensor:
    """Return `random_u16` as fractions in [0, 1), fp32 m×n: what stochastic rounding adds."""
    return random_u16(seed, m, n, stream).float() / 65536
