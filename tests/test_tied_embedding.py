"""The embedding that shares its table with the head: one gradient, the sum of both."""

import pytest
import torch
from torch.nn import functional as F

from jetfire.nn import TiedGradient, linear_cross_entropy, tied_embedding
from jetfire.nn.embedding import add_rows


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_rows_are_added(device, tokens):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(9, (tokens,), generator=generator).to(device)
    gradient = torch.randn((tokens, 12), generator=generator).to(device)
    table = torch.randn((20, 12), generator=generator).to(device)
    expected = table.double().index_add(0, ids, gradient.double())
    found = add_rows(table, ids, gradient)
    assert found.data_ptr() == table.data_ptr()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_rows_are_added_to_the_same_bits(device):
    """Many rows of few ids, where an order left to chance would show."""
    ids = torch.randint(3, (500,), device=device)
    gradient = torch.randn((500, 64), device=device)
    table = torch.randn((1000, 64), device=device)
    first = add_rows(table.clone(), ids, gradient)
    assert all(torch.equal(add_rows(table.clone(), ids, gradient), first) for _ in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_table_and_a_gradient_of_any_float(device, dtype):
    """And of any strides: an expanded gradient, a table that is a transpose."""
    ids = torch.tensor([2, 5, 2, 2, 0], device=device)
    whole = torch.randint(-8, 9, (5, 12), device=device)
    for gradient in (
        whole.to(dtype),
        whole[:, :1].to(dtype).expand(5, 12),
        whole[:, ::2].to(dtype),
    ):
        n = gradient.shape[1]
        for table in (
            torch.ones((6, n), dtype=dtype, device=device),
            torch.ones((n, 6), dtype=dtype, device=device).t(),
            torch.ones((n, 6), device=device).t(),
        ):
            expected = table.double().index_add(0, ids, gradient.double())
            assert add_rows(table, ids, gradient) is table
            assert torch.equal(table.double(), expected)


def test_a_table_of_float64_is_summed_in_float64(device):
    table = torch.zeros((3, 2), dtype=torch.float64, device=device)
    gradient = torch.full((2, 2), 1 / 3, dtype=torch.float64, device=device)
    add_rows(table, torch.tensor([1, 1], device=device), gradient)
    assert table.tolist() == [[0.0, 0.0], [2 / 3, 2 / 3], [0.0, 0.0]]


def test_one_gradient_of_embedding_and_head(device):
    table = torch.randn((64, 16), device=device, requires_grad=True)
    other = table.detach().clone().requires_grad_()
    ids = torch.randint(60, (2, 10), device=device)
    targets = torch.randint(60, (20,), device=device)
    tied = TiedGradient()
    x = tied_embedding(table, ids, tied).flatten(0, 1)
    linear_cross_entropy(x, table, targets, tied=tied).mean().backward()
    y = F.embedding(ids, other).flatten(0, 1)
    F.cross_entropy(y @ other.t(), targets).backward()
    torch.testing.assert_close(table.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert tied.take() is None


def test_without_a_head_it_is_an_embedding(device):
    table = torch.randn((10, 4), device=device, requires_grad=True)
    ids = torch.tensor([[1, 1], [3, 9]], device=device)
    tied_embedding(table, ids, TiedGradient()).sum().backward()
    expected = torch.zeros(10, 4, device=device)
    expected[1], expected[3], expected[9] = 2, 1, 1
    assert torch.equal(table.grad, expected)
