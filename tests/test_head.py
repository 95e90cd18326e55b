"""nn.head: an output head that is padded for its products gives what one that is not gives."""

import copy

import pytest
import torch

from jetfire.nn import AdamW, Int8Linear, quantised_weights
from jetfire.nn.head import Int8Head

INPUTS, OUTPUTS, BLOCK = 64, 97, 32


def step(layer, x):
    """Return a step's output and gradients: of the input, and of the layer's parameters."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    layer.zero_grad()
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters())]


def pair(bias=True):
    torch.manual_seed(0)
    head = Int8Head(INPUTS, OUTPUTS, bias, BLOCK)
    plain = Int8Linear(INPUTS, OUTPUTS, bias, BLOCK)
    plain.load_state_dict(head.state_dict())
    return head, plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_it_has_the_bits_of_a_linear_layer(bias, autocast):
    head, plain = pair(bias)
    x = torch.randn(2, 40, INPUTS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = step(head, x), step(plain, x)
    assert ours[0].shape == (2, 40, OUTPUTS)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_gradients_the_weight_is_not_copied(monkeypatch):
    head, _ = pair()
    x = torch.randn(3, INPUTS)
    expected = head(x)
    padded, real = [], Int8Head._padded
    monkeypatch.setattr(Int8Head, "_padded", lambda self, p: padded.append(p) or real(self, p))
    with torch.no_grad():
        assert torch.equal(head(x), expected)
    assert [id(p) for p in padded] == [id(head.bias)]


def test_its_products_are_of_whole_blocks():
    """That is all it is for: codes of the transpose have rows of a multiple of 16 bytes."""
    head, plain = pair()
    assert plain.codes().qt.shape == (INPUTS, OUTPUTS)
    assert head.codes().qt.shape == (INPUTS, 128)
    assert head.codes().q.shape == (128, INPUTS)


def test_codes_are_made_once_per_step():
    head, _ = pair()
    before = head.codes()
    assert head.codes() is before
    optimizer = AdamW(head.parameters(), 0.1, model=head)
    assert quantised_weights(head) == {}
    step(head, torch.randn(8, INPUTS))
    optimizer.step()
    after = head.codes()
    assert after is not before
    assert not torch.equal(after.q, before.q)
    assert not after.q[OUTPUTS:].any()


def test_it_copies_and_compiles():
    head, _ = pair()
    x = torch.randn(40, INPUTS)
    expected = step(head, x)
    other = copy.deepcopy(head)
    found = step(torch.compile(other, backend="aot_eager", fullgraph=True), x)
    assert torch.equal(found[0], expected[0])
    assert (found[1] - expected[1]).norm() < 0.05 * expected[1].norm()  # other draws
