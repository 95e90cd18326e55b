"""What arXiv 2306.11987 proves of its gradients, of the references that kernels must reproduce."""

import math
from functools import cache

import pytest
import torch

from jetfire.reference import lss
from jetfire.reference.bit_split import bit_split, unit_of
from jetfire.reference.hadamard import matrix, transform
from jetfire.reference.nibbles import unpack
from jetfire.reference.sample_rows import (
    HIGH,
    ONE,
    chances_of,
    drawn,
    factors,
    probabilities,
    weights,
)

M, N, K, DRAWS = 40, 16, 16, 500
X_STEP, W_STEP = torch.tensor([0.37]), torch.tensor([0.021])


def layer(seed=0, spread=1.5, m=M):
    """A gradient whose rows differ by e^spread, and the codes of x and w."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    gradient = normal(m, N) * (spread * normal(m, 1)).exp()
    qx = (3 * normal(m, K)).round().clamp(-8, 7).to(torch.int8)
    qw = (3 * normal(N, K)).round().clamp(-8, 7).to(torch.int8)
    return gradient, qx, qw


def exact(gradient, qx, qw):
    """G·Ŵ and Gᵀ·X̂ in float64."""
    g = gradient.double()
    return g @ (W_STEP.double() * qw.double()), g.t() @ (X_STEP.double() * qx.double())


@cache
def draws(**fields):
    """Both gradients of a `layer` for each of 500 seeds, 500×m×k and 500×n×k."""
    gradient, qx, qw = layer(**fields)
    found = [
        lss.gradients(gradient, qx, X_STEP, qw, W_STEP, torch.tensor([1000 + seed]))
        for seed in range(DRAWS)
    ]
    return [torch.stack(both) for both in zip(*found, strict=True)]


def errors_off(values, expected):
    """How many standard errors the mean of draws (along dim 0) is from what it should be.

    A mean of draws that are all alike is right to a rounding.
    """
    error = values.std(dim=0) / len(values) ** 0.5
    return (values.mean(dim=0) - expected).abs() / (error + 1e-6 * expected.abs() + 1e-12)


def projections(values, expected):
    """Inner products of rows, of columns and of all with what they should be."""
    products = values * expected
    return torch.cat(
        [products.sum(-1), products.sum(-2), products.sum((-1, -2))[..., None]], dim=-1
    )


def assert_unbiased(values, expected):
    """Rows, columns and the whole within 4 standard errors, single elements within 5.

    Few draws are not 0 where an element is a small part of a unit, so that the mean of 500 is still
    skewed there.
    """
    assert float(values.std(dim=0).max()) > 0
    z = errors_off(projections(values, expected), projections(expected, expected))
    assert float(z.max()) < 4, float(z.max())
    z = errors_off(values, expected)
    assert float(z.max()) < 5, float(z.max())


@pytest.mark.parametrize("spread", [0.2, 1.5])
def test_both_gradients_are_unbiased(spread):
    """Theorem 1, and what follows of it for the sampled products, over 500 draws."""
    both = exact(*layer(spread=spread))
    for values, expected in zip(draws(spread=spread), both, strict=True):
        assert_unbiased(values, expected)
        # And the errors are what standard errors are, about one in root mean square.
        assert 0.4 < float(errors_off(values, expected).square().mean()) < 1.6


def test_the_test_of_the_mean_sees_a_bias():
    """Codes of the kept rows that are not divided by their probabilities; the high part alone."""
    gradient, qx, qw = layer()
    packed, unit, squares = bit_split(gradient, 8, torch.tensor([0]))
    codes = unpack(packed)
    found = []
    for seed in range(DRAWS):
        chances = chances_of(squares, 2, "half")
        sampled = drawn(chances, torch.tensor([seed]), 2, 256, "dgrad")
        high = sampled["rows"] < M
        kept = (sampled["rows"] >= 0).float()
        plain = {**sampled, "weight": kept * torch.where(high, 14.0, 1.0)}
        found.append(lss.input_gradient(codes, unit, qw, W_STEP, plain))
    expected, _ = exact(gradient, qx, qw)
    with pytest.raises(AssertionError):
        assert_unbiased(torch.stack(found), expected)
    alone = codes.clone()
    alone[M:] = 0
    whole = drawn([ONE] * 2 * M, torch.tensor([0]), 2, 256, "dgrad")
    one = lss.input_gradient(alone, unit, qw, W_STEP, whole)
    assert float((one - expected).norm() / expected.norm()) > 0.01


def test_the_gradient_of_a_layer_with_its_transform_is_unbiased():
    """dX = (dX̂ ∘ I)·Hᵀ is linear in dX̂: its mean is that of the exact product."""
    gradient, qx, qw = layer(spread=1.5)
    passed = ((qx > -8) & (qx < 7)).double()
    assert 0 < float(passed.mean()) < 1
    found, expected = draws(spread=1.5)[0], exact(gradient, qx, qw)[0]
    assert_unbiased((found * passed) @ matrix(K).t(), (expected * passed) @ matrix(K).t())


@pytest.mark.parametrize("group", [1, 4, 32])
def test_the_product_of_transformed_operands_is_the_product(group):
    """H is orthogonal: (X·H)·(W·H)ᵀ = X·Wᵀ, so that quantised ones approximate it."""
    x, w = torch.randn(20, 64).double(), torch.randn(30, 64).double()
    torch.testing.assert_close(
        transform(x, group) @ transform(w, group).t(), x @ w.t(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(transform(transform(x, group), group), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [8, 4])
def test_exact_where_nothing_is_dropped(bits):
    """keep="all" is the product with the codes themselves, to float64's own rounding."""
    gradient, qx, qw = layer()
    seed = torch.tensor([9])
    packed, unit, _ = bit_split(gradient, bits, seed)
    codes = unpack(packed).double()
    whole = unit.double() * (HIGH * codes[:M] + codes[M:] if bits == 8 else codes)
    found = lss.gradients(gradient, qx, X_STEP, qw, W_STEP, seed, bits, "all")
    for value, expected in zip(found, exact(whole, qx, qw), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)
    # And the codes are the gradient to a unit, or half of one.
    assert float((whole - gradient).abs().max()) <= float(unit) * (1 if bits == 8 else 0.5) * 1.001


def test_half_is_exact_where_half_of_the_rows_are_zero():
    """A gradient of multiples of 14 units: lo is 0, and the m rows of hi are all kept."""
    gradient, qx, qw = layer()
    gradient = (gradient * 7 / gradient.abs().amax()).round() * HIGH
    assert float(unit_of(gradient, 8)) == 1.0
    found = lss.gradients(gradient, qx, X_STEP, qw, W_STEP, torch.tensor([2]))
    for value, expected in zip(found, exact(gradient, qx, qw), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)


# Variance


def variance(chances, codes, other):
    """Σ (1/p − 1)·‖c·g‖²·‖x‖², of draws that do not depend on each other (proposition 2)."""
    m = len(other)
    factor = torch.tensor(factors(m, len(codes) // m)).double()
    a = factor.square() * codes.double().square().sum(dim=1)
    b = other.double().square().sum(dim=1).repeat(len(codes) // m)
    inverse = torch.tensor([ONE / c if c else 1.0 for c in chances])
    return float(((inverse - 1) * a * b).sum())


def squared_error(chances, codes, qx, count=300):
    """The mean of ‖dŴ − its mean‖² over draws, of rows with these probabilities."""
    one = torch.ones(1)
    whole = drawn([ONE] * len(codes), torch.tensor([0]), 2, 2 * 128, "wgrad")
    expected = lss.weight_gradient(codes, one, qx, one, whole)
    total = 0.0
    for seed in range(count):
        sampled = drawn(chances, torch.tensor([seed]), 2, 2 * 128, "wgrad")
        found = lss.weight_gradient(codes, one, qx, one, sampled)
        total += float((found - expected).square().sum())
    return total / count


def test_less_variance_than_uniform_sampling_of_heavy_rows():
    """With as many rows: a fifth of it and less, as computed and as drawn."""
    gradient, qx, _ = layer(spread=1.5)
    packed, _, squares = bit_split(gradient, 8, torch.tensor([0]))
    codes = unpack(packed)
    x_squares = qx.int().square().sum(dim=1, dtype=torch.int32)
    leverage = chances_of(squares, 2, "half", x_squares)
    uniform = [ONE // 2] * len(codes)
    assert variance(leverage, codes, qx) < variance(uniform, codes, qx) / 5
    assert squared_error(leverage, codes, qx) < squared_error(uniform, codes, qx) / 5


def test_systematic_draws_have_about_the_variance_of_independent_ones():
    """Half to one and a half times the formula's, plus what rounding 1/p to integers adds."""
    gradient, _, qw = layer(spread=1.0)
    packed, _, squares = bit_split(gradient, 8, torch.tensor([0]))
    codes = unpack(packed)
    chances = chances_of(squares, 2, "half")
    one, whole = torch.ones(1), drawn([ONE] * 2 * M, torch.tensor([0]), 2, 256, "dgrad")
    expected = lss.input_gradient(codes, one, qw, one, whole)
    total = 0.0
    for seed in range(400):
        sampled = drawn(chances, torch.tensor([seed]), 2, 256, "dgrad")
        found = lss.input_gradient(codes, one, qw, one, sampled)
        total += float((found - expected).square().sum()) / 400
    # A row of dX̂ has the variance of its own two parts: ‖c·g·Ŵ‖² in place of ‖c·g‖²·‖x‖².
    factor = torch.tensor(factors(M, 2)).double()
    terms = factor.square() * (codes.double() @ qw.double()).square().sum(dim=1)
    inverse = torch.tensor([ONE / c if c else 1.0 for c in chances])
    independent = float(((inverse - 1) * terms).sum())
    assert 0.5 < total / independent < 1.5


def test_no_other_probabilities_of_the_same_sum_have_less_variance():
    """Moving a little of it from one row to another, of all pairs."""
    gradient, _, _ = layer(spread=1.5)
    _, _, squares = bit_split(gradient, 8, torch.tensor([0]))
    c2 = [factor * factor for factor in factors(M, 2)]
    scores = [c * s for c, s in zip(c2, squares.tolist(), strict=True)]
    p = [chance / ONE for chance in probabilities(weights(scores), M)]
    assert abs(sum(p) - M) < 1e-6
    assert any(chance == 1 for chance in p)
    some = [i for i, chance in enumerate(p) if chance > 0]
    best = sum(scores[i] / p[i] for i in some)
    for i in some:
        for j in some:
            move = 0.01 * min(p[i], 1 - p[j])
            if i == j or move == 0:
                continue
            changed = (
                best
                - scores[i] / p[i]
                - scores[j] / p[j]
                + scores[i] / (p[i] - move)
                + scores[j] / (p[j] + move)
            )
            assert changed >= best * (1 - 1e-9)


# The edges


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("keep", ["half", "all"])
def test_a_gradient_of_zeros_gives_zeros(bits, keep):
    _, qx, qw = layer()
    seed = torch.tensor([0])
    found = lss.gradients(torch.zeros(M, N), qx, X_STEP, qw, W_STEP, seed, bits, keep)
    assert all((value == 0).all() for value in found)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_fault_shows_in_both_gradients(bits, value):
    gradient, qx, qw = layer()
    gradient[17, 3] = value
    found = lss.gradients(gradient, qx, X_STEP, qw, W_STEP, torch.tensor([0]), bits)
    assert all(value.isnan().all() for value in found)


def test_one_token_is_unbiased():
    """Of its two rows one is kept, or now and then the other."""
    both = exact(*layer(seed=5, m=1))
    for values, expected in zip(draws(seed=5, m=1), both, strict=True):
        assert_unbiased(values, expected)


def test_one_row_that_is_not_zero_is_exact_to_its_rounding():
    gradient, qx, qw = layer()
    gradient[torch.arange(M) != 7] = 0
    unit = float(unit_of(gradient, 8))
    dx, dw = lss.gradients(gradient, qx, X_STEP, qw, W_STEP, torch.tensor([4]))
    expected_dx, expected_dw = exact(gradient, qx, qw)
    assert (dx[torch.arange(M) != 7] == 0).all()
    bound = unit * float(W_STEP) * qw.double().abs().sum(dim=0)
    assert bool(((dx - expected_dx)[7].abs() <= bound).all())
    bound = unit * float(X_STEP) * qx[7].double().abs()
    assert bool(((dw - expected_dw).abs() <= bound * 1.001).all())
