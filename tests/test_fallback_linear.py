"""Layers whose input has fallback: accuracy, thresholds, conversion, saving."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetfire.core.errors import UsageError
from jetfire.gpt2.model.families import block_of
from jetfire.gpt2.model.gpt2 import GPT2
from jetfire.gpt2.model.llama import LlamaBlock
from jetfire.gpt2.model.shape import LlamaShape, Shape
from jetfire.gpt2.model.tensors import load_model
from jetfire.nn import RECIPES, Int8Linear, convert, watch
from jetfire.nn.fallback import Fallback

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = "int8-fallback"


def decibels(value, exact):
    error = value.detach() - exact.detach()
    return 10 * math.log10(float(exact.detach().square().sum() / error.square().sum()))


def step(layer):
    """An optimizer's step that changes no weight."""
    torch.optim.SGD(layer.parameters(), 0.0).step()


def trained(layer, x, steps):
    """Steps of training, in which only the threshold changes."""
    for _ in range(steps):
        layer(x)
        step(layer)


def test_each_product_with_outliers_is_as_good_as_without(device):
    """Forward, and the weight's gradient beside a channel of outliers, whose steps are wide."""
    torch.manual_seed(0)
    x = torch.randn(256, 1024, device=device)
    x[:, 200] *= 100
    near = slice(128, 200)  # of the outliers' blocks
    g = torch.randn(256, 128, device=device)
    plain = Int8Linear(1024, 128, bias=False, block=128, device=device)
    layer = Int8Linear(1024, 128, bias=False, block=128, device=device, fallback=0.2)
    layer.load_state_dict(plain.state_dict())
    trained(layer, x, 3)
    assert 1 / 8 <= float(layer.fallback.share) <= 0.3
    found = {}
    for name, one in (("off", plain), ("on", layer)):
        y = one(x)
        (dw,) = torch.autograd.grad(y, one.weight, g)
        exact = x.double() @ one.weight.double().t(), g.double().t() @ x.double()
        found[name] = decibels(y, exact[0]), decibels(dw[:, near], exact[1][:, near])
    off, on = found["off"], found["on"]
    assert on[0] > off[0] + 12
    assert on[1] > off[1] + 18


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_thresholds_settle_at_the_rate(device, rate):
    """The first batch's own; then as values grow, and as they shrink."""
    torch.manual_seed(0)
    x = torch.randn(320, 640, device=device) * torch.randn(640, device=device).exp()
    quantiser, weight = Fallback(rate, device), nn.Linear(1, 1)

    def shares(x, steps):
        found = []
        for _ in range(steps):
            quantiser(x, 32, "q")
            found.append(float(quantiser.share))
            step(weight)
        return found

    def near(found):
        return all(abs(share - rate) <= rate / 2 + 1e-6 for share in found)

    assert shares(x, 3) == pytest.approx([rate] * 3, abs=0.006)
    grown = shares(30 * x, 60)
    assert grown[0] > 0.9
    assert near(grown[-10:])
    shrunk = shares(15 * x, 60)
    assert shrunk[0] < rate / 2
    assert near(shrunk[-10:])
    threshold = float(quantiser.threshold)
    shares(x / 1000, 1)
    assert float(quantiser.threshold) == pytest.approx(threshold * 1.3**-rate, rel=1e-6)


@pytest.mark.parametrize("fault", [0.0, math.nan, math.inf])
def test_a_faulty_first_batch_is_recovered_from(device, fault):
    quantiser, weight = Fallback(0.2, device), nn.Linear(1, 1)
    quantiser(torch.full((64, 64), fault, device=device), 32, "q")
    step(weight)
    assert 0 < float(quantiser.threshold) < math.inf


@pytest.mark.parametrize("fault", [0.0, math.nan])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_first_batch_without_values_leaves_the_threshold_to_the_next(device, fault, compiles):
    torch._dynamo.reset()
    layer = Int8Linear(64, 32, device=device, fallback=0.2)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    x = torch.randn(640, 64, device=device)
    trained(call, torch.full_like(x, fault), 2)
    state = layer.state_dict()
    again = Int8Linear(64, 32, device=device, fallback=0.2)
    again.load_state_dict(state)
    for one in (call, again):
        one(x)
        assert float(one.fallback.share) == pytest.approx(0.2)
        threshold = float(one.fallback.threshold)
        assert 1 < threshold < 6
        one(100 * x)
        assert float(one.fallback.threshold) == threshold


def test_a_first_batch_that_is_mostly_padding_sets_the_threshold_by_the_rest(device):
    quantiser = Fallback(0.2, device)
    x = torch.randn(640, 64, device=device)
    x[128:] = 0
    quantiser(x, 32, "q")
    assert 1 < float(quantiser.threshold) < 6
    assert float(quantiser.share) == pytest.approx(0.2 / 5, abs=0.02)


def test_a_threshold_moves_once_a_step_of_training_alone(device):
    layer = Int8Linear(64, 32, device=device, fallback=0.2)
    x = torch.randn(64, 64, device=device)
    threshold = layer.fallback.threshold
    step(layer)
    layer.eval()(x)
    step(layer)
    layer.train()(x[:0])
    step(layer)
    assert float(threshold) == 0
    layer(x)
    step(layer)
    before = float(threshold)
    for _ in range(3):
        layer(100 * x)
    step(layer)
    step(layer)
    assert float(threshold) == pytest.approx(before * 1.3**0.8, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(device, reentrant):
    found = []
    for through in (False, True):
        torch.manual_seed(0)
        layer = Int8Linear(64, 64, device=device, fallback=0.2)
        x = torch.randn(64, 64, device=device, requires_grad=True)
        for size in (1, 10, 1):
            given = size * x
            y = checkpoint(layer, given, use_reentrant=reentrant) if through else layer(given)
            y.square().sum().backward()
            step(layer)
        found.append((x.grad, layer.weight.grad, layer.fallback.threshold))
    assert all(map(torch.equal, *found))


def test_convert_save_and_load(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(device)
    plain = copy.deepcopy(model)
    report = convert(model, RECIPE)
    assert report.converted == ("0", "2")
    assert (model[0].block, model[0].fallback.rate) == (128, 0.2)
    x = torch.randn(256, 64, device=device)
    trained(model, x, 2)
    assert float(model[0].fallback.threshold) > 0
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = copy.deepcopy(plain)
    convert(again, RECIPE)
    assert float(again[0].fallback.threshold) == 0
    again.load_state_dict(torch.load(file))
    assert torch.equal(again[0].fallback.threshold, model[0].fallback.threshold)
    assert torch.equal(again.eval()(x), model.eval()(x))
    again.load_state_dict(plain.state_dict())  # which has none: they stay
    again.train()(1000 * x)  # nor does a batch set what is known
    assert torch.equal(again[0].fallback.threshold, model[0].fallback.threshold)
    assert convert(model, "int8").converted == ()


def test_a_threshold_of_a_model_made_without_memory_is_not_set(device, monkeypatch):
    """Loaded from a plain model's state, which has none: what lay in the new memory stayed."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96))
    convert(model, RECIPE)

    def filled(x, *args, **options):
        return torch.full_like(x, 7.0, *args, **options)

    monkeypatch.setattr(torch, "empty_like", filled)
    model.to_empty(device=device)
    model.load_state_dict(nn.Sequential(nn.Linear(64, 96)).state_dict())
    assert float(model[0].fallback.threshold) == 0
    model(1000 * torch.randn(64, 64, device=device))
    assert float(model[0].fallback.threshold) > 1000


@pytest.mark.parametrize("state_of", ["plain", "converted"])
def test_a_model_made_on_meta_adapts_once_its_weights_are_assigned(state_of):
    """No state has the share: it stayed on meta, and the threshold where it was."""
    torch.manual_seed(0)
    source, x = nn.Sequential(nn.Linear(64, 96)), torch.randn(64, 64)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96))
    convert(model, RECIPE)
    if state_of == "converted":
        convert(source, RECIPE)
        source(x)
    model.load_state_dict(source.state_dict(), assign=True)
    with torch.inference_mode():
        model.eval()(x)
    model.train()
    optimizer, thresholds = torch.optim.SGD(model.parameters(), 1e-9), []
    for _ in range(3):
        model(100 * x if thresholds else x).sum().backward()
        optimizer.step()
        thresholds.append(float(model[0].fallback.threshold))
    assert 0 < thresholds[0] < thresholds[1] < thresholds[2]


def test_a_copy_adapts_by_itself(device):
    layer = Int8Linear(64, 32, device=device, fallback=0.2)
    other = copy.deepcopy(layer)
    other(torch.randn(64, 64, device=device))
    step(other)
    assert float(layer.fallback.threshold) == 0 < float(other.fallback.threshold)
    third, before = copy.deepcopy(other), float(other.fallback.threshold)
    third(100 * torch.randn(64, 64, device=device))
    step(third)
    assert float(other.fallback.threshold) == before < float(third.fallback.threshold)


def test_a_threshold_is_fp32_whatever_the_model_is_cast_to(device):
    layer = Int8Linear(64, 32, device=device, fallback=0.2)
    x = torch.randn(64, 64, device=device)
    layer(x)
    threshold = layer.fallback.threshold.clone()
    layer.half()
    assert torch.equal(layer.fallback.threshold, threshold)
    layer(x.half()).sum().backward()
    step(layer)
    assert layer.fallback.threshold.dtype == layer.fallback.share.dtype == torch.float32


def test_what_it_is_not_for():
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(UsageError, match=f"frozen=True with recipe={RECIPE}: expected one without"):
        convert(model, RECIPE, frozen=True)
    with pytest.raises(UsageError, match=r"fallback=1\.5: expected a share between 0 and 1"):
        Fallback(1.5)


def test_blocks_are_converted_layer_by_layer(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=60, n_positions=32, bos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    report = convert(model, RECIPE, fused=True)
    assert report.fused == ()
    assert report.single == {"transformer.h.0": f"recipe {RECIPE} has no flow"}
    assert len(report.converted) == 4
    ids = torch.randint(60, (2, 32), device=device)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_watch_sees_both_planes(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64)).to(device)
    convert(model, RECIPE)
    model.eval()
    model[0].fallback.threshold.fill_(20.0)
    x = torch.randn(256, 512, device=device)
    x[3, 5] = 1000.0
    exact = x[:128, :128].double()
    with watch(model) as seen:
        model(x).sum().backward()
    quality = seen.input["0"]
    assert quality.fallback == 1 / 8
    assert quality.largest == pytest.approx(1000 / 127)
    model[0].fallback.threshold.fill_(2000.0)
    with watch(model) as seen:
        model(x).sum().backward()
    assert exact.abs().max() == 1000
    assert seen.input["0"].fallback == 0.0
    assert quality.sqnr > seen.input["0"].sqnr + 8


def test_linear_compiles(device):
    torch.manual_seed(0)
    layer = Int8Linear(64, 32, device=device, fallback=0.2)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 64, device=device)
    for size in (1, 100, 100):
        for one, call in ((layer, layer), (other, compiled)):
            torch.manual_seed(1)
            call(size * x).square().sum().backward()
            step(one)
    assert float(layer.fallback.threshold) > 5
    assert torch.equal(layer.fallback.threshold, other.fallback.threshold)
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)


def test_gpt2_trains_and_any_checkpoint_loads(device, tmp_path):
    shape = Shape(layers=1, heads=2, width=64, context=32, vocabulary=60)
    model, other = (GPT2(shape, recipe).to(device) for recipe in (RECIPE, "int8"))
    ids = torch.randint(60, (2, 32), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        model(ids, ids).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    state = model.state_dict()
    assert {name for name in state if name not in other.state_dict()} == {
        f"blocks.0.{name}.fallback.threshold"
        for name in ("qkv", "projection", "expand", "contract")
    }
    load_model(other, state, tmp_path)
    load_model(model, other.state_dict(), tmp_path)
    state["blocks.0.qkv.fallback.threshold"][0] = math.nan
    with pytest.raises(UsageError, match="threshold holds NaN or Inf: expected finite"):
        load_model(model, state, tmp_path)


def test_llama_s_block(device):
    shape = LlamaShape(1, 2, 64, 32, vocabulary=64, kv_heads=1, hidden=96)
    block = block_of(shape, RECIPES[RECIPE]).to(device)
    assert isinstance(block, LlamaBlock)
    assert block.gate.fallback.rate == 0.2
    assert block.gate.bias is None
