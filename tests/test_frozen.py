"""Frozen layers: what they hold and keep, their products, and adapters on them."""

import copy
import weakref

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from jetfire.core.errors import UsageError
from jetfire.nn import FrozenInt8Linear, Int8Conv1D, Int8Linear, convert
from jetfire.nn import conversion as conversion_module
from jetfire.reference.dequantize import dequantize
from jetfire.reference.quantize import quantize, spread
from jetfire.tests.language_models import attends_causally, calls, compiled
from jetfire.tests.test_nn_gradients import (
    double,
    drawn,
    half_steps,
    hoeffding,
    leaf,
    quantised,
    unbiased,
)

pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = "int8-block32"
ROWS, INPUTS, OUTPUTS = 75, 70, 140


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="needs peft")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


def pair(device="cpu", block=32, dtype=torch.float32, bias=True):
    """A layer that learns, with its weight frozen, and a frozen one of the same numbers."""
    linear = Int8Linear(INPUTS, OUTPUTS, bias, block=block, device=device, dtype=dtype)
    linear.weight.requires_grad_(False)
    return linear, FrozenInt8Linear(linear.weight, linear.bias, block)


def kept(function):
    """The tensors that backward will read, of a function's call."""
    found = []

    def pack(tensor):
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return found


# What a layer holds and keeps


def test_holds_codes_alone(device):
    linear, frozen = pair(device)
    held = [*frozen.parameters(), *frozen.buffers()]
    scales = -(-INPUTS // 32) * -(-OUTPUTS // 32)
    assert sum(t.nbytes for t in held) == INPUTS * OUTPUTS + 4 * scales + linear.bias.nbytes
    assert not any(p.requires_grad for p in frozen.parameters())
    assert list(frozen.state_dict()) == ["codes", "bias", "scale"]
    assert vars(frozen).keys() - vars(nn.Linear(1, 1)).keys() == {"block", "dtype"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [32, 128])
def test_is_the_layer_that_it_was(device, block, bias, dtype):
    """Bit for bit, its input's gradient and that of a bias which learns all the same."""
    linear, frozen = pair(device, block, dtype, bias)
    x = torch.randn(2, ROWS, INPUTS, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(2, ROWS, OUTPUTS, device=device, dtype=dtype)
    leaves = {linear: [x], frozen: [x]}
    if bias:
        frozen.bias.requires_grad_()
        leaves = {linear: [x, linear.bias], frozen: [x, frozen.bias]}
    found = []
    for layer in (linear, frozen):
        torch.manual_seed(1)
        y = layer(x)
        found.append((y, *torch.autograd.grad(y, leaves[layer], g)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["frozen", "linear", "conv1d"])
def test_keeps_nothing_of_an_input_for_a_weight_that_does_not_learn(device, kind):
    linear, frozen = pair(device)
    conv1d = Int8Conv1D(nn.Parameter(linear.weight.t().contiguous()), linear.bias, 32)
    layer = {"frozen": frozen, "linear": linear, "conv1d": conv1d}[kind]
    x = torch.randn(ROWS, INPUTS, device=device, requires_grad=True)

    def sizes():
        layer.weight.requires_grad_(False) if kind != "frozen" else None
        return sorted(t.numel() for t in kept(lambda: layer(x)))

    weight = [-(-INPUTS // 32) * -(-OUTPUTS // 32), INPUTS * OUTPUTS]
    assert sizes() == [1, *weight]  # and the key of the gradient's rounding
    if kind != "frozen":
        layer.weight.requires_grad_()
        assert ROWS * INPUTS in [t.numel() for t in kept(lambda: layer(x))]


def test_saves_and_loads(device, tmp_path):
    _, frozen = pair(device)
    _, other = pair(device)
    x = torch.randn(ROWS, INPUTS, device=device)
    assert not torch.equal(other(x), frozen(x))
    save_file(frozen.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors", device=str(device)))
    assert torch.equal(other(x), frozen(x))
    assert torch.equal(copy.deepcopy(other)(x), frozen(x))


def test_a_change_of_dtype_leaves_the_scales(device):
    _, frozen = pair(device)
    x = torch.randn(ROWS, INPUTS, device=device).bfloat16()
    before, scale = frozen(x), frozen.scale.clone()
    frozen.bfloat16()
    assert frozen.weight.dtype == frozen.bias.dtype == torch.bfloat16
    assert torch.equal(frozen.scale, scale)
    frozen.bias.data = frozen.bias.data.float()
    torch.testing.assert_close(frozen(x), before, rtol=0.01, atol=0.01)
    assert frozen.float().weight.dtype == torch.float32
    whole = frozen.weight + 0
    assert torch.equal(frozen.double().weight + 0, whole.double())


def test_compiles(device):
    _, frozen = pair(device)
    x = torch.randn(ROWS, INPUTS, device=device, requires_grad=True)
    torch._dynamo.reset()
    found = []
    for module in (frozen, torch.compile(frozen, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        y = module(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Its weight as floats


def test_weight_reads_as_the_codes_values(device):
    linear, frozen = pair(device)
    expected = dequantize(*quantize(linear.weight.detach(), 32), 32, torch.float32)
    assert torch.equal(frozen.weight.detach(), expected)
    assert torch.equal(frozen.weight.data, expected)
    assert torch.equal(
        functional.linear(torch.eye(INPUTS, device=device), frozen.weight).t(), expected
    )
    assert frozen.weight.shape == (OUTPUTS, INPUTS)
    assert frozen.weight.device == linear.weight.device
    assert torch.equal(torch.empty_like(expected).copy_(frozen.weight), expected)


@pytest.mark.parametrize("through", ["weight", "data"])
def test_weight_written_is_quantised(device, through):
    linear, frozen = pair(device)
    if through == "weight":
        frozen.weight = -linear.weight
    else:
        frozen.weight.data = -linear.weight
    expected = FrozenInt8Linear(-linear.weight, None, 32)
    assert torch.equal(frozen.codes, expected.codes)
    assert torch.equal(frozen.scale, expected.scale)
    frozen.weight = frozen.weight
    assert torch.equal(frozen.scale, expected.scale)


def test_refuses_in_one_line():
    _, frozen = pair()
    said = r"aten.mul_.Tensor on a frozen weight: expected an assignment to its data"
    with pytest.raises(UsageError, match=said):
        frozen.weight.mul_(2)
    with pytest.raises(UsageError, match=r"weight of shape \(2, 3\): expected \(140, 70\)"):
        frozen.weight = torch.zeros(2, 3)
    with pytest.raises(UsageError, match=r"input of shape \(4, 71\): expected 70 columns"):
        frozen(torch.zeros(4, 71))
    with pytest.raises(UsageError, match=r"weight of torch.float64: expected bfloat16"):
        FrozenInt8Linear(torch.zeros(4, 4, dtype=torch.float64), None)
    for recipe in ("bf16", "int4-hq"):
        said = f"frozen=True with recipe={recipe}: expected an INT8 recipe"
        with pytest.raises(UsageError, match=said):
            convert(nn.Sequential(nn.Linear(2, 2)), recipe, frozen=True)
    expected = "FrozenInt8Linear(in_features=70, out_features=140, bias=True, block=32)"
    assert repr(frozen) == expected


# Conversion


def test_a_weight_is_freed_as_its_layer_is_replaced(monkeypatch):
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive, replace = [], conversion_module._replacement

    def spy(*args):
        alive.append(sum(weight() is not None for weight in weights))
        return replace(*args)

    monkeypatch.setattr(conversion_module, "_replacement", spy)
    assert len(convert(model, INT8, frozen=True).converted) == 4
    assert alive == [4, 3, 2, 1]
    report = convert(model, INT8)
    assert report.left == {str(i): "FrozenInt8Linear already, in blocks of 32" for i in range(4)}


def test_two_names_are_one_frozen_layer():
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU())
    model.append(model[0])
    assert convert(model, INT8, frozen=True).converted == ("0", "2")
    assert model[0] is model[2]


# Adapters


def adapted(peft, model, targets, **options):
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def delta(layer):
    """What a layer's adapter adds to its weight, float64."""
    a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    return layer.scaling["default"] * b @ a


def test_gradients_of_adapters(device, peft):
    """Against float64 autograd of the dequantised problem.

    Those of the second layer's adapter are exact. What reaches the first's comes through a product
    of the second layer's gradient as it is rounded, in whose error e (rows × inputs) it is linear.
    """
    block = 32
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, INPUTS)).to(device)
    convert(model, INT8, frozen=True)
    first, second = adapted(peft, model, ["0", "1"]).base_model.model
    x, g = leaf(ROWS, INPUTS, device=device), torch.randn(ROWS, INPUTS, device=device)
    leaves = [
        part["default"].weight for layer in (first, second) for part in (layer.lora_A, layer.lora_B)
    ]
    a1, b1, a2, b2 = wide = double(*leaves)
    w1, w2 = (layer.base_layer.dequantised().double() for layer in (first, second))
    bias1, bias2 = (layer.base_layer.bias.double() for layer in (first, second))
    of_x, times = quantised(x.detach().double(), block), first.scaling["default"]
    h = of_x @ w1.t() + bias1 + times * x.double() @ a1.t() @ b1.t()
    exact = torch.autograd.grad(h @ w2.t() + bias2 + times * h @ a2.t() @ b2.t(), wide, g.double())

    draws = drawn(lambda: second(first(x)), leaves, g)
    e = half_steps(g.double(), block).square()
    of_a = times**2 * ((e @ (w2 @ b1).square()).t() @ x.double().square()).detach()
    of_b = times**2 * ((e @ w2.square()).t() @ (x.double() @ a1.t()).square()).detach()
    for index, variance in enumerate((of_a, of_b)):
        unbiased(
            draws[index],
            exact[index],
            variance.sqrt(),
            torch.zeros_like(variance),
            hoeffding(variance.numel()),
        )
    for index in (2, 3):
        assert bool((draws[index] == draws[index][:1]).all())
        torch.testing.assert_close(draws[index][0], exact[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("safe", [False, True])
def test_merging_quantises_anew(device, peft, safe, dtype):
    """Within half a step of the sum, and what `dtype` rounds; taking it out again, within two."""
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS)).to(device, dtype)
    convert(model, INT8, frozen=True)
    wrapped = adapted(peft, model, ["0"])
    layer = wrapped.base_model.model[0]
    base = layer.base_layer
    before = base.dequantised().double()
    expected = before + delta(layer)

    def step():
        return spread(base.scale, 32, OUTPUTS, INPUTS).double()

    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    wrapped.merge_adapter(safe_merge=safe)
    error = (base.dequantised().double() - expected).abs()
    slack = 0.5 * step() + rounding * (before.abs() + 2 * expected.abs() + delta(layer).abs())
    assert bool((error <= slack + 1e-7).all())
    assert float(error.max()) > 0.1 * float(step().min())
    wrapped.unmerge_adapter()
    error = (base.dequantised().double() - before).abs()
    slack += 0.5 * step() + rounding * (2 * before.abs() + expected.abs() + delta(layer).abs())
    assert bool((error <= slack + 1e-7).all())


def hugging_face(transformers, kind):
    if kind == "gpt2":
        sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
        end = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **end)), "c_attn"
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config), "all-linear"


def error_of(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kind", "order"),
    [("gpt2", "convert first"), ("llama", "convert first"), ("llama", "adapters first")],
)
def test_adapters_train_merge_save_and_load(device, peft, transformers, kind, order, tmp_path):
    """The adapter alone loads on plain `transformers`; the merged model on a converted one."""
    model, targets = hugging_face(transformers, kind)
    model.to(device)
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)
    targets = targets if targets == "all-linear" else [targets, "c_proj", "c_fc"]
    config = peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2")
    if order == "convert first":
        convert(model, INT8, frozen=True)
    wrapped = peft.get_peft_model(model, config)
    if order == "adapters first":
        reasons = convert(model, INT8, frozen=True).left.values()
        assert "an adapter" in reasons
    ids = torch.randint(96, (4, 24), device=device)
    learns = [p for p in wrapped.parameters() if p.requires_grad]
    assert learns
    optimizer = torch.optim.AdamW(learns, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = wrapped(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05

    wrapped.eval()
    with torch.no_grad():
        logits = wrapped(ids).logits
        wrapped.save_pretrained(tmp_path / "adapter")
        on_plain = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        assert error_of(on_plain(ids).logits, logits) < 0.03
        merged = wrapped.merge_and_unload()
        assert error_of(merged(ids).logits, logits) < 0.03
        convert(twin, INT8, frozen=True)
        twin.load_state_dict(merged.state_dict())
        assert torch.equal(twin.eval()(ids).logits, merged(ids).logits)


def loss_of_compiled(wrapped, partition=min_cut_rematerialization_partition, **given):
    """A step's loss as it is, and compiled; and the graphs, forward and backward."""
    ids = torch.arange(48, device="cpu").view(2, 24)
    before = float(wrapped(ids, labels=ids, use_cache=False, **given).loss.detach())
    graphs = compiled(wrapped, partition)
    loss = wrapped(ids, labels=ids, use_cache=False, **given).loss
    loss.backward()
    return before, float(loss.detach()), graphs


@pytest.mark.parametrize("given", ["nothing", "mask"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_compiled_model_has_no_mask_that_is_causal_alone(peft, transformers, kind, given):
    """The loss is what it is without torch.compile, where `transformers` looks at the mask."""
    model, target = hugging_face(transformers, kind)
    convert(model.eval(), INT8, frozen=True)
    wrapped = adapted(peft, model, target if kind == "llama" else [target])
    mask = {"attention_mask": (torch.arange(24, device="cpu") > 7).expand(2, 24).long()}
    before, loss, graphs = loss_of_compiled(wrapped, **(mask if given == "mask" else {}))
    assert loss == pytest.approx(before, abs=1e-4)
    assert attends_causally(graphs) == (given == "nothing")


def test_a_compiled_encoder_sees_all_tokens(transformers):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=64)).eval()
    convert(model, INT8, frozen=True)
    ids = torch.arange(24, device="cpu").view(1, 24)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        compiled(model)
        torch.testing.assert_close(model(ids).last_hidden_state, expected)


def test_a_compiled_layer_quantises_once_what_products_share(peft, transformers):
    """Query, key and value read one input, gate and up another; nothing is transposed for forward.

    In backward each product has a gradient of its own, but the first layer's query, key and value,
    whose input has none. No codes are kept for it: those of a weight are there.
    """
    model, targets = hugging_face(transformers, "llama")
    convert(model, INT8, frozen=True)
    _, _, (forward, backward) = loss_of_compiled(adapted(peft, model, targets))
    counts = [
        [
            len(calls([graph], f"jetfire.{name}."))
            for name in ("quantize", "gemm", "times_transpose")
        ]
        for graph in (forward, backward)
    ]
    assert counts == [[2 * 4, 2 * 7, 0], [2 * 7 - 3, 0, 2 * 7 - 3]]
    assert {n.args[4] for n in calls([forward, backward], "jetfire.quantize.")} == {"q"}
    (*_, output) = forward.graph.nodes
    codes = [
        n for n in output.args[0] if n.op != "placeholder" and n.meta["val"].dtype == torch.int8
    ]
    assert not codes


def test_an_adapter_on_a_conv1d_keeps_its_layout(peft, transformers):
    """It would add a square matrix the wrong way round."""
    model, target = hugging_face(transformers, "gpt2")
    wrapped = adapted(peft, model, [target], fan_in_fan_out=True)
    left = convert(wrapped, INT8, frozen=True).left
    reasons = {reason for name, reason in left.items() if name.endswith(f"{target}.base_layer")}
    assert reasons == {"an adapter expects its weight in×out: freeze it before"}
    base = wrapped.base_model.model.transformer.h[0].attn.c_attn.base_layer
    before = base.weight.detach().clone()
    assert len(convert(wrapped, INT8).converted) == 2
    layer = wrapped.base_model.model.transformer.h[0].attn.c_attn
    expected = before.double() + delta(layer).t()
    wrapped.merge_adapter()
    assert isinstance(layer.base_layer, Int8Conv1D)
    torch.testing.assert_close(layer.base_layer.weight.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_peak_of_adapters_on_a_frozen_base(peft, transformers):
    """Of 7B's layers, all 32: at most 0.55 of what the same takes on a BF16 base, 13 GB."""

    def peak(frozen):
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
        )
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        if frozen:
            convert(model, "int8", frozen=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
        optimizer = torch.optim.AdamW(p for p in wrapped.parameters() if p.requires_grad)
        ids = torch.randint(256, (1, 512), device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            wrapped(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()

    assert peak(True) <= 0.55 * peak(False)


def test_a_parameter_may_be_assigned_to_the_weight():
    """As tying it to another's does."""
    layer = FrozenInt8Linear(torch.zeros(64, 64), None)
    layer.weight = torch.nn.Parameter(torch.ones(64, 64))
    assert torch.equal(layer.dequantised(), torch.ones(64, 64))
    assert "weight" not in dict(layer.named_parameters())
