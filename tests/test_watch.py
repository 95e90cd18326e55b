"""What quantisation does to a model's products, seen in one step of it."""

import math

import pytest
import torch
from torch import nn

from jetfire import ops
from jetfire.gpt2.model.gpt2 import GPT2
from jetfire.gpt2.model.shape import Shape
from jetfire.nn import (
    CodesQuality,
    Int8Block,
    Int8Linear,
    Int8LlamaBlock,
    Stream,
    Watched,
    convert,
    watch,
    watching,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(256, 384), (130, 70)])
def test_sqnr_is_that_of_the_matrix(device, rounding, block, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) * torch.rand(shape[0], 1, device=device)
    seed = torch.tensor([5], device=device)
    codes = ops.int8_quantize(x, block=block, rounding=rounding, seed=seed)
    error = ops.int8_dequantize(codes, out="fp32") - x
    exact = 10 * math.log10(float(x.square().sum() / error.square().sum()))
    found = CodesQuality.of(codes, rounding == "stochastic")
    assert found.sqnr == pytest.approx(exact, abs=0.2)
    assert found.zeros == pytest.approx(float((codes.q == 0).float().mean()))
    # The largest of every block, and what is rounded to it.
    assert codes.scale.numel() / x.numel() <= found.clipped < 0.05
    assert found.largest == float(codes.scale.max())


def test_of_zeros(device):
    codes = ops.int8_quantize(torch.zeros(32, 32, device=device))
    assert CodesQuality.of(codes) == CodesQuality(math.inf, 1.0, 0.0, 0.0)


def test_a_large_matrix_is_looked_at_in_parts(device, monkeypatch):
    x = torch.randn(300, 70, device=device) * torch.rand(300, 1, device=device)
    codes = ops.int8_quantize(x, block=32)
    whole = CodesQuality.of(codes)
    monkeypatch.setattr(watching, "_AT_ONCE", 2 * 32 * 70)
    parts = CodesQuality.of(codes)
    assert parts.sqnr == pytest.approx(whole.sqnr, abs=1e-9)
    assert (parts.zeros, parts.clipped, parts.largest) == (
        whole.zeros,
        whole.clipped,
        whole.largest,
    )


def test_what_is_not_finite_is_the_worst(device):
    x = torch.randn(64, 64, device=device)
    good, zero = CodesQuality.of(ops.int8_quantize(x)), CodesQuality(math.inf, 1.0, 0.0, 0.0)
    x[40, 3] = math.inf
    bad = CodesQuality.of(ops.int8_quantize(x))
    assert math.isnan(bad.sqnr)
    assert math.isnan(bad.largest)
    seen = Watched({"a": good, "b": zero}, {"a": zero, "b": bad}, {"a": good})
    found = [(layer, kind) for layer, kind, _ in seen.worst(4)]
    assert found[:3] == [("b", "input"), ("a", "weight"), ("a", "gradient")]
    assert seen.worst() == seen.worst(4)[:1]


def test_layers_one_by_one(device):
    """Each by its name: an outlier in one layer's input shows there alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)).to(device)
    convert(model)
    x = torch.randn(128, 64, device=device, requires_grad=True)
    with watch(model) as plain:
        model(x).square().sum().backward()
    with torch.no_grad():
        x[3, 5] = 1000.0
    with watch(model) as outlier:
        model(x).square().sum().backward()
    for seen in (plain, outlier):
        assert list(seen.weight) == list(seen.input) == ["0", "2"]
        assert set(seen.gradient) == {"0", "2"}
    assert outlier.input["0"].zeros > 0.4 > 0.1 > plain.input["0"].zeros
    assert outlier.input["2"].zeros < 0.1
    assert 30 < plain.input["0"].sqnr < 50
    assert 25 < plain.gradient["2"].sqnr < 45


def test_a_head_of_any_vocabulary_is_seen(device):
    table = nn.Embedding(300, 128)
    model = nn.Sequential(table, nn.Linear(128, 128), nn.Linear(128, 300)).to(device)
    model[2].weight = table.weight
    convert(model, head=True)
    with watch(model) as seen:
        model(torch.arange(64, device=device)).square().sum().backward()
    assert all(of.keys() == {"1", "2"} for of in vars(seen).values())
    plain = nn.Sequential(table, nn.Linear(128, 128), nn.Linear(128, 300)).to(device)
    plain[2].weight = nn.Parameter(table.weight.detach().clone())
    convert(plain)
    with watch(plain) as without:
        plain(torch.arange(64, device=device)).square().sum().backward()
    assert seen.weight["2"] == without.weight["2"]
    for of in (seen.gradient["2"], without.gradient["2"]):
        assert of.zeros < 0.1  # a quarter of the padded codes are of the padding
        assert 25 < of.sqnr < 45


def test_nothing_is_seen_afterwards(device):
    model = nn.Sequential(nn.Linear(32, 32)).to(device)
    convert(model)
    with pytest.raises(RuntimeError, match="its own"), watch(model) as seen:
        raise RuntimeError("its own")
    model(torch.randn(32, 32, device=device))
    assert seen.input == {}


def test_each_step_s_codes_are_known_as_their_own_layer_s(device):
    """Freed codes leave addresses that another layer's may get."""
    inputs = [torch.randn(64, 64, device=device, requires_grad=True) for _ in range(3)]

    def seen_in(watched):
        """What was seen after each step, of a watch of all of them or of each."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
        convert(model)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []

        def step(x, seen):
            model(x).square().sum().backward()
            found.append((dict(seen.input), dict(seen.gradient)))
            optimizer.step()

        if watched == "all":
            with watch(model) as seen:
                for x in inputs:
                    step(x, seen)
        else:
            for x in inputs:
                with watch(model) as seen:
                    step(x, seen)
        return found

    found = seen_in("all")
    assert found == seen_in("each")
    assert all(of.keys() == {str(i) for i in range(6)} for pair in found for of in pair)
    assert found[0] != found[1]


def test_a_fused_block_that_runs_layer_by_layer(device):
    """Without autocast its layers are multiplied by each by itself."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    assert convert(model, "int8-block32", fused=True).fused
    ids = torch.randint(32, (2, 32), device=device)
    found = {}
    for autocast in (False, True):
        with watch(model) as seen, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            model(ids, labels=ids).loss.backward()
        assert set(seen.input) == set(seen.gradient) == set(seen.weight)
        assert len(seen.weight) == 7
        found[autocast] = seen
    gate = "model.layers.0.mlp.gate_proj"
    assert found[True].input[gate].sqnr == pytest.approx(found[False].input[gate].sqnr, abs=1.0)


def test_a_product_of_no_rows_is_passed_over(device):
    model = nn.Sequential(nn.Linear(32, 32)).to(device)
    convert(model)
    with watch(model) as seen:
        model(torch.zeros(0, 32, device=device))
    assert (seen.input, list(seen.weight)) == ({}, ["0"])


def test_no_second_copy_of_codes_is_left(device):
    block = Int8LlamaBlock(64, 2, 1, 96, device=device)
    with watch(block) as seen:
        pass
    assert set(seen.weight) == {"query", "key", "value", "projection", "gate", "up", "down"}
    assert block.query._quantised.latest is None


@pytest.mark.parametrize("kind", [Int8Block, Int8LlamaBlock])
def test_a_fused_block(device, kind):
    """Every layer is seen, and the step is what it is unseen."""
    torch.manual_seed(0)
    sizes = (64, 2) if kind is Int8Block else (64, 2, 1, 96)
    block = kind(*sizes, device=device)
    x = torch.randn(64, 64, device=device).bfloat16().requires_grad_()

    def gradient():
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(block(Stream.of(x, 32), 2).x.float().sum(), x)
        return found

    expected = gradient()
    with watch(block) as seen:
        assert torch.equal(gradient(), expected)
    layers = {name for name, module in block.named_modules() if isinstance(module, Int8Linear)}
    assert set(seen.weight) == set(seen.input) == set(seen.gradient) == layers
    if kind is Int8LlamaBlock:
        assert seen.input["query"] == seen.input["key"] != seen.input["gate"]


@pytest.mark.parametrize("recipe", ["int8", "int8-block32"])
def test_a_whole_gpt2(device, recipe):
    """Its blocks' layers by their parameters' names, and an output head in INT8."""
    with device:
        model = GPT2(Shape(2, 2, 32, 16, vocabulary=50), recipe)
    ids = torch.randint(50, (2, 16), device=device)
    with watch(model) as seen:
        model(ids, ids).backward()
    parts = ("qkv", "projection", "expand", "contract")
    layers = {f"blocks.{number}.{part}" for number in range(2) for part in parts}
    layers |= {"tokens"} if recipe == "int8" else set()
    assert set(seen.weight) == set(seen.input) == set(seen.gradient) == layers
