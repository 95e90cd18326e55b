"""What backward keeps of a layer's input in 4 bits: bytes, accuracy, choice; for the rest, INT8.

That its gradients are right in the mean: tests/test_nn_gradients.py.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import jetfire
from jetfire.core.errors import UsageError
from jetfire.measure.data import Source
from jetfire.nn import Int8Block, Int8Conv1D, Int8Linear, Int8LlamaBlock, Recipe, Stream, convert
from jetfire.ops import int8_quantize

pytestmark = pytest.mark.usefixtures("one_thread")

DOCS = Path(jetfire.__file__).parent / "docs" / "arithmetic.md"
CPU = torch.device("cpu")
INPUTS = {
    "normal": lambda: Source("normal", CPU, 0).floats(2048, 512),
    "outlier": lambda: Source("outlier", CPU, 0).floats(2048, 512),
    "heavy": lambda: Source("heavy", CPU, 0).floats(2048, 512),
    "GELU's outputs": lambda: nn.functional.gelu(Source("normal", CPU, 0).floats(2048, 512)),
}


def kept_bytes(function):
    """The bytes of the tensors, but parameters, that backward will read of a function's call."""
    found = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(found.values()), result


@pytest.mark.parametrize("name", INPUTS)
def test_accuracy_of_a_weight_s_gradient(device, name):
    """In dB, of one draw in blocks of 128: as docs/arithmetic.md has it."""
    row = re.search(rf"^\| {name}.*\| ([0-9.]+) \| ([0-9.]+) \|$", DOCS.read_text(), re.MULTILINE)
    x = INPUTS[name]()
    g = Source("normal", CPU, 1).floats(len(x), 256).to(device)
    exact = g.double().t() @ x.to(device).double()
    for kept, expected in zip((8, 4), row.groups(), strict=True):
        layer = Int8Linear(x.shape[1], 256, False, 128, device=device, kept=kept)
        (dw,) = torch.autograd.grad(layer(x.to(device)), layer.weight, g)
        error = (dw.double() - exact).square().sum()
        assert 10 * math.log10(exact.square().sum() / error) == pytest.approx(
            float(expected), abs=0.3
        )


@pytest.mark.parametrize("block", [32, 128])
def test_bytes_of_a_layer(device, block):
    """Per token and column 0.5 of codes, 1/32 of steps, and its share of a block's FP32 scale."""
    x = torch.randn((256, 512), device=device)
    size = {}
    for kept in (8, 4):
        layer = Int8Linear(512, 128, block=block, device=device, kept=kept)
        codes = sum(t.nbytes for t in layer.codes()[2:4]) + 8  # of the weight, and a key
        size[kept] = (kept_bytes(lambda layer=layer: layer(x))[0] - codes) / x.numel()
    scales = 4 / block**2
    assert size == {8: 1 + scales, 4: 1 / 2 + 1 / 32 + scales}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bytes_of_a_fused_block(device, family):
    """Norms' outputs are made again, and attention's is in 4 bits; what it keeps: see below."""
    size = {}
    for kept in (8, 4):
        if family == "gpt2":
            block = Int8Block(128, 2, block=128, flow=32, device=device, kept=kept)
        else:
            block = Int8LlamaBlock(128, 2, hidden=384, block=128, flow=32, kept=kept, device=device)
        stream = Stream.of(torch.randn((256, 128), device=device).bfloat16(), 32)
        size[kept], _ = kept_bytes(lambda block=block, stream=stream: block(stream, 2))
    scales = 4 / 128**2
    assert size[8] - size[4] == 256 * 128 * (2 * (1 + scales) + 1 / 2 - 1 / 32)


@pytest.fixture
def in_codes(monkeypatch):
    """What attention keeps as codes: the shape of each matrix, and the key of its rounding."""
    found = []

    def quantised(x, **options):
        found.append((tuple(x.shape), int(options["seed"])))
        return int8_quantize(x, **options)

    monkeypatch.setattr("jetfire.nn.attention.int8_quantize", quantised)
    return found


def block_of(family, kept, device):
    torch.manual_seed(0)
    if family == "gpt2":
        return Int8Block(128, 2, block=128, flow=32, device=device, kept=kept)
    sizes = {"hidden": 384, "kv_heads": 1}
    return Int8LlamaBlock(256, 2, block=128, flow=32, kept=kept, device=device, **sizes)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_attention_keeps_codes(device, family, in_codes):
    """Query, key, value and output, with a key each; forward is to the bit what it was."""
    outputs, gradients = {}, {}
    for kept in (8, 4):
        block = block_of(family, kept, device)
        width = block.width
        x = torch.randn((256, width), device=device).bfloat16().requires_grad_()
        outputs[kept] = block(Stream.of(x, 32), 2).x
        outputs[kept].sum().backward()
        gradients[kept] = x.grad.float()
    of_kv = width if family == "gpt2" else width // 2
    assert sorted(shape for shape, _ in in_codes) == sorted(
        [(256, width), (256, of_kv), (256, of_kv), (256, width)]
    )
    assert len({key for _, key in in_codes}) == 4
    assert torch.equal(outputs[8], outputs[4])
    error = (gradients[4] - gradients[8]).norm() / gradients[8].norm()
    assert 0 < error < 0.05


def test_hooks_around_a_block_see_what_attention_keeps(device, in_codes):
    """They say what is kept: activation checkpointing would recompute nothing that ours took."""
    block = block_of("gpt2", 4, device)
    stream = Stream.of(torch.randn((256, 128), device=device).bfloat16(), 32)
    size, _ = kept_bytes(lambda: block(stream, 2))
    assert size > 4 * 2 * 256 * 128
    assert not in_codes


def test_a_layer_that_does_not_learn_keeps_nothing(device):
    x = torch.randn((64, 96), device=device, requires_grad=True)
    layer = Int8Linear(96, 32, device=device, kept=4)
    layer.weight.requires_grad_(False)
    codes = sum(t.nbytes for t in layer.codes()[2:4]) + 8
    assert kept_bytes(lambda: layer(x))[0] == codes
    with torch.no_grad():
        assert kept_bytes(lambda: layer(x))[0] == 0


def test_evaluation_packs_nothing(device, monkeypatch):
    monkeypatch.setattr("jetfire.nn.products.int4_pack", None)
    block = Int8Block(64, 2, device=device, kept=4).eval()
    with torch.no_grad():
        block(Stream.of(torch.randn((64, 64), device=device).bfloat16(), 32), 1)
        Int8Linear(64, 32, device=device, kept=4)(torch.randn((8, 64), device=device))


def test_compiles(device):
    """By another key in backward, which a compiler draws anew: other roundings, as fine ones."""
    torch.manual_seed(0)
    layer = Int8Linear(64, 32, device=device, kept=4)
    x = torch.randn((512, 64), device=device, requires_grad=True)
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for call in (layer, fast):
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs, noise in zip(*found, (0, 0.02, 0.3, 0.02), strict=True):
        assert float((ours - theirs).norm()) <= noise * float(theirs.norm())


def test_convert_by_layer(device):
    """What `keep` leaves a second recipe takes."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(device)
    convert(model, "int8-kept4", keep=("2",))
    convert(model, "int8")
    assert [(model[i].block, model[i].kept) for i in (0, 2)] == [(128, 4), (128, 8)]
    assert repr(model[0]).endswith("block=128, kept=4)")
    assert repr(model[2]).endswith("block=128)")
    x = torch.randn((32, 64), device=device)
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_fused_blocks_of_transformers(device, kind):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=1, n_embd=64, n_head=2, vocab_size=60, n_positions=32, bos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=60,
        )
        model = transformers.LlamaForCausalLM(config)
    report = convert(model.to(device), Recipe("mine", 32, 32, kept=4), fused=True)
    assert len(report.fused) == 1
    ids = torch.randint(60, (2, 32), device=device)

    def run():
        with torch.autocast(device.type, torch.bfloat16):
            return model(ids, labels=ids).loss

    packed, loss = kept_bytes(run)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, Int8Linear | Int8Conv1D):
            layer.kept = 8
    scales = 4 / 32**2
    assert kept_bytes(run)[0] - packed == 64 * 64 * (2 * (1 + scales) + 1 / 2 - 1 / 32)


def test_what_is_refused():
    with pytest.raises(UsageError, match="kept=5: expected 8 or 4"):
        Recipe("mine", 128, kept=5)
    with pytest.raises(UsageError, match="kept=4 with recipe=mine: expected an INT8 recipe"):
        Recipe("mine", kept=4)
    with pytest.raises(UsageError, match=r"kept=4 with fallback=0\.2: expected one of them"):
        Recipe("mine", 128, fallback=0.2, kept=4)
    with pytest.raises(UsageError, match="kept=3: expected 8 or 4"):
        Int8Linear(8, 8, kept=3)
    with pytest.raises(UsageError, match="kept=16: expected 8 or 4"):
        Int8Block(64, 2, kept=16)
