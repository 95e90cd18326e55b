"""Int8Linear and the GPT-2 path that stands on it."""

import pytest
import torch

from jetfire.gpt2.train import build, train
from jetfire.nn import Int8Linear, convert
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError


@pytest.mark.parametrize("block", [32, 64, 128])
def test_linear_and_its_gradients_are_near_float(device, block):
    torch.manual_seed(0)
    exact = torch.nn.Linear(70, 40).to(device)
    linear = Int8Linear(70, 40, block=block).to(device)
    linear.load_state_dict(exact.state_dict())
    x = torch.randn(3, 30, 70, device=device)
    grad = torch.randn(3, 30, 40, device=device)
    found = {}
    for name, module in (("exact", exact), ("int8", linear)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        found[name] = (y, leaf.grad, module.weight.grad, module.bias.grad)
    for ours, theirs in zip(found["int8"], found["exact"], strict=True):
        assert ours.shape == theirs.shape
        error = (ours.detach() - theirs.detach()).norm() / theirs.detach().norm()
        assert error.item() < 0.03
    assert torch.allclose(linear.bias.grad, exact.bias.grad, rtol=1e-5, atol=1e-5)


def test_convert_keeps_parameters_and_skips_what_it_is_told_to():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    weight = model[0].weight
    assert convert(model, 32, skip=("2",)) == ["0"]
    assert isinstance(model[0], Int8Linear)
    assert model[0].weight is weight
    assert type(model[2]) is torch.nn.Linear


def test_linear_refuses_float64():
    with pytest.raises(UsageError, match="float64"):
        Int8Linear(8, 8)(torch.zeros(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32"])
def test_tiny_learns_and_repeats(recipe):
    here = Device.parse("auto")
    first = [s.loss for s in train("tiny", recipe, here, steps=12)]
    assert first[-1] < first[0] - 1.0
    again = [s.loss for s in train("tiny", recipe, here, steps=3)]
    assert again[0] == first[0]


def test_unknown_names_are_refused():
    here = Device.parse("auto")
    with pytest.raises(UsageError, match="no preset 'gpt9'"):
        build("gpt9", "bf16", here, 0)
    with pytest.raises(UsageError, match="no recipe 'fp4'"):
        build("tiny", "fp4", here, 0)
