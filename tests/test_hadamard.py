"""The reference of the Hadamard transform, its step sizes, and the quantiser's gradients."""

import math

import pytest
import torch

from jetfire.reference.hadamard import GROUPS, initial_step, matrix, search_group, transform
from jetfire.reference.hadamard_quantize import (
    gathered,
    input_gradient,
    inside,
    multiplier,
    quantize,
    step_terms,
)


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_the_product_with_an_orthogonal_symmetric_matrix(group):
    h = matrix(group)
    assert torch.equal(h, h.t())
    assert set((h * math.sqrt(group)).round().unique().tolist()) <= {-1.0, 1.0}
    torch.testing.assert_close(h @ h, torch.eye(group, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(5, 2048, dtype=torch.float64)
    expected = (x.view(5, -1, group) @ h).view(5, 2048)
    torch.testing.assert_close(transform(x, group), expected, rtol=0, atol=1e-12)
    single = transform(x.float(), group)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)


def test_a_product_of_two_transforms_is_the_product():
    x, w = (torch.randn(size, 96, dtype=torch.float64) for size in (7, 5))
    torch.testing.assert_close(transform(x, 32) @ transform(w, 32).t(), x @ w.t())


def test_it_spreads_an_outlier_over_its_group():
    x = torch.zeros(1, 128)
    x[0, 40] = 8.0
    t = transform(x, 64)
    assert torch.equal(t[:, :64].abs(), torch.full((1, 64), 1.0))
    assert not t[:, 64:].any()


def test_the_initial_step_is_twice_the_mean_over_the_root_of_seven():
    t = torch.tensor([[1.0, -3.0], [2.0, -2.0]])
    assert initial_step(t).tolist() == pytest.approx([4.0 / math.sqrt(7.0)])


def test_the_search_takes_the_group_of_least_error():
    """Where a few columns are large, groups pay."""
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    x[:, ::96] *= 40.0
    errors = {}
    for group in (g for g in GROUPS if 384 % g == 0):
        t = transform(x, group)
        step = initial_step(t)
        q, scale, _ = quantize(x, step, group)
        errors[group] = float((t - scale * q).square().sum())
    assert search_group(x) == min(errors, key=errors.get) >= 16
    assert errors[search_group(x)] < errors[1] / 2
    assert search_group(torch.zeros(4, 96)) == 1


def lsq(t, step):
    """LSQ as torch's autograd has it: rounding passes its gradient on, clamping where it must."""
    v = (t / step).clamp(-8, 7)
    return (v + (v.round() - v).detach()) * step


@pytest.mark.parametrize("group", [1, 8, 64])
def test_both_gradients_are_those_of_autograd(group):
    """But for codes of either end that were not clipped, whose gradient is set to 0 here."""
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(33, 192, generator=generator).bfloat16()
    step = torch.full((1,), 0.21)
    t = transform(x.double(), group).requires_grad_()
    exact_step = step.double().requires_grad_()
    y = lsq(t, exact_step)
    q, scale, _ = quantize(x, step, group)
    assert torch.equal(scale, step)
    torch.testing.assert_close(y, q.double() * step.double())
    v = t.detach() / step.double()
    dy = torch.randn(33, 192, generator=generator)
    dy.masked_fill_(~inside(q) & (v >= -8) & (v <= 7), 0.0)
    grad_t, grad_step = torch.autograd.grad(y, (t, exact_step), dy.double())
    assert not bool(inside(q).all())
    found = input_gradient(dy, q, group)
    torch.testing.assert_close(found.double(), transform(grad_t, group), rtol=0, atol=1e-5)
    codes, terms = step_terms(dy, x, step, group)
    assert torch.equal(codes, q)
    torch.testing.assert_close(terms.sum().reshape(1), grad_step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-42])
def test_a_step_that_is_none_gives_codes_of_zero_and_a_scale_that_shows_it(step):
    step = torch.tensor([step])
    q, scale, squares = quantize(torch.randn(3, 64), step, 32)
    assert multiplier(step, 32).tolist() == [0.0]
    assert math.isnan(scale.item())
    assert not q.any()
    assert not squares.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", [1, 2, 32])
def test_what_is_not_finite_shows_in_the_scale(value, group):
    x = torch.randn(4, 64)
    step = torch.full((1,), 0.5)
    clean, scale, _ = quantize(x, step, group)
    assert torch.equal(scale, step)
    x[2, 37] = value
    q, scale, _ = quantize(x, step, group)
    assert math.isnan(scale.item())
    same = torch.ones(4, 64, dtype=torch.bool)
    same[2, 37 // group * group : (37 // group + 1) * group] = False
    assert torch.equal(q[same], clean[same])


def test_gathering_puts_the_parts_together():
    dx_hat = torch.randn(5, 6).bfloat16()
    slots = torch.tensor([[0, 3], [-1, 1], [4, -1], [-1, -1]], dtype=torch.int32)
    rows = dx_hat.float()
    expected = torch.stack([rows[0] + rows[3], rows[1], rows[4], torch.zeros(6)])
    assert torch.equal(gathered(dx_hat, slots, torch.ones(1)), expected)
    bad = gathered(dx_hat, slots, torch.tensor([math.nan]))
    assert torch.equal(bad.isnan().any(1), torch.tensor([False, True, True, True]))
    assert torch.equal(bad[0], expected[0])
