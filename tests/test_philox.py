"""Philox: known answers, NumPy's own generator, the kernels' bits."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from jetfire.kernels_triton.common import random_u16 as random_u16_tile
from jetfire.reference.philox import (
    ROUNDS,
    STREAM_DROPOUT,
    STREAM_ROUNDING,
    philox4x32,
    random_u16,
)

# Salmon et al., table of constants, for words of 32 and of 64 bits.
MULTIPLIERS = {
    32: (0xD2511F53, 0xCD9E8D57),
    64: (0xD2E7470EE14C6C93, 0xCA5A826395121157),
}
WEYL = {32: (0x9E3779B9, 0xBB67AE85), 64: (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)}


def philox4(counter, key, width, rounds):
    """Philox4×width in Python's integers, written from the paper's figure 1 alone."""
    mask = (1 << width) - 1
    left, right, k = list(counter[0::2]), list(counter[1::2]), list(key)
    for _ in range(rounds):
        products = [m * word for m, word in zip(MULTIPLIERS[width], left, strict=True)]
        high = [p >> width for p in products]
        left = [high[1] ^ right[0] ^ k[0], high[0] ^ right[1] ^ k[1]]
        right = [products[1] & mask, products[0] & mask]
        k = [(word + step) & mask for word, step in zip(k, WEYL[width], strict=True)]
    return [left[0], right[0], left[1], right[1]]


# Of the generator's authors (Random123, kat_vectors).
KNOWN = [
    (7, (0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_known_answers(rounds, counter, key, words):
    assert tuple(philox4(counter, key, 32, rounds)) == words
    ours = philox4x32(tuple(torch.tensor([c]) for c in counter), key, rounds)
    assert tuple(int(word) for word in ours) == words


def test_the_generic_form_is_numpys():
    rng = np.random.default_rng(0)
    counter, key = (rng.integers(2**63, size=size, dtype=np.uint64) for size in (4, 2))
    generator = np.random.Philox(counter=counter, key=key)
    counter = [int(c) for c in counter]
    for _ in range(5):
        counter[0] += 1  # NumPy counts before it draws
        expected = philox4(counter, [int(k) for k in key], 64, 10)
        assert [int(word) for word in generator.random_raw(4)] == expected


@pytest.mark.parametrize("rounds", [1, 7, 10])
def test_the_reference_is_the_generic_form(rounds):
    rng = np.random.default_rng(rounds)
    counters = rng.integers(2**32, size=(4, 50))
    counters[:, 0] = 2**32 - 1  # the largest products
    for key in (tuple(int(k) for k in rng.integers(2**32, size=2)), (2**32 - 1,) * 2):
        ours = philox4x32(tuple(torch.from_numpy(c) for c in counters), key, rounds)
        for i, counter in enumerate(counters.T):
            expected = philox4([int(c) for c in counter], key, 32, rounds)
            assert [int(word[i]) for word in ours] == expected


def test_an_element_s_bits_are_its_half_of_its_counter_s_words():
    seed = torch.tensor([0x123456789ABCDEF0])
    bits = random_u16(seed, 3, 21, STREAM_DROPOUT, row0=5)
    for i, j in [(0, 0), (2, 7), (1, 8), (2, 20)]:
        key = (0x9ABCDEF0, 0x12345678)
        words = philox4((j // 8, 5 + i, 0, STREAM_DROPOUT), key, 32, ROUNDS)
        assert int(bits[i, j]) == words[j % 8 // 2] >> 16 * (j % 2) & 0xFFFF


def test_bits_are_uniform_and_streams_apart():
    seed = torch.tensor([99])
    bits = random_u16(seed, 512, 1024)
    # Chi-square of 256 bins of the high and of the low byte: mean 255, deviation √510.
    for part in (bits >> 8, bits & 255):
        counts = torch.bincount(part.flatten(), minlength=256).double()
        expected = bits.numel() / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi2 - 255) < 5 * 510**0.5
    # Neighbours, rows and streams: a correlation's deviation is 1/√count.
    x = bits.double() - 32767.5
    other = random_u16(seed, 512, 1024, STREAM_DROPOUT).double() - 32767.5
    for a, b in [(x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[:, 8:], x[:, :-8]), (x, other)]:
        correlation = float((a * b).mean()) / (65536**2 / 12)
        assert abs(correlation) < 5 / a.numel() ** 0.5


@triton.jit
def draw_kernel(
    bits_ptr, seed_ptr, row0, col0, R: tl.constexpr, C: tl.constexpr, STREAM: tl.constexpr
):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(bits_ptr + at, random_u16_tile(tl.load(seed_ptr), row0, col0, R, C, STREAM))


@pytest.mark.parametrize("stream", [STREAM_ROUNDING, STREAM_DROPOUT])
@pytest.mark.parametrize("seed", [0, 1, -1, 0x7FFFFFFFFFFFFFFF, 0x123456789ABCDEF0])
@pytest.mark.parametrize(("row0", "col0"), [(0, 0), (37, 272), (2**31 - 64, 2**31 - 64)])
def test_triton_draws_the_reference_s_bits(device, seed, stream, row0, col0):
    key = torch.tensor([seed], dtype=torch.int64, device=device)
    bits = torch.full((16, 64), -1, dtype=torch.int32, device=device)
    draw_kernel[(1,)](bits, key, row0, col0, 16, 64, STREAM=stream)
    rows = torch.arange(row0, row0 + 16, device=device)[:, None].expand(16, 8)
    groups = torch.arange(col0 // 8, col0 // 8 + 8, device=device).expand(16, 8)
    zero = torch.zeros_like(rows)
    words = philox4x32(
        (groups, rows, zero, zero + stream), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    )
    halves = torch.stack([h for w in words for h in (w & 0xFFFF, w >> 16)], dim=-1)
    assert torch.equal(bits.long(), halves.reshape(16, 64))
