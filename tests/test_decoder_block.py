"""Llama, Mistral, Qwen2 and Qwen3 of `transformers` with INT8 between their layers, on the CPU."""

import copy
import pickle

import pytest
import torch

from jetfire.nn import AdamW, Int8LlamaBlock, Recipe, Stream, convert, flow
from jetfire.nn.decoder_block import FAMILIES, DecoderBlock
from jetfire.tests.language_models import (
    Doubled,
    attends_causally,
    batch,
    compiled,
    doubling,
    error,
    logits,
    near,
    step,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [name.removesuffix("DecoderLayer") for name in FAMILIES]
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def model(kind="Llama", dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)


def fused(kind="Llama", recipe="int8", **options):
    made = model(kind, **options)
    report = convert(made, recipe, fused=True)
    layers = range(made.config.num_hidden_layers)
    assert report.fused == tuple(f"model.layers.{i}" for i in layers)
    assert report.single == {}
    return made


def singly(kind="Llama", **options):
    made = model(kind, **options)
    convert(made, head=True)  # as `fused` has it
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["int8", "int8-block32"])
def test_loss_and_gradients_are_near_float(kind, recipe):
    loss, gradients = step(fused(kind, recipe))
    exact, theirs = step(model(kind))
    assert loss == pytest.approx(exact, abs=0.01)
    near(gradients, theirs, 0.12)


@pytest.mark.parametrize(
    ("how", "recipe", "vocabulary", "block"),
    [
        ({"fused": True}, "int8", 256, 128),
        ({"fused": True}, Recipe("mine", 128, 32, head=64), 192, 64),
        ({"fused": True}, "int8", 96, 128),
        ({"fused": True}, "int8-block32", 256, None),
        ({"fused": True, "head": False}, "int8", 256, None),
        ({"fused": True, "head": True}, "int8-block32", 96, 32),
        ({}, "int8", 256, None),
        ({"head": True}, "int8", 96, 128),
    ],
)
def test_an_output_head_in_int8(how, recipe, vocabulary, block):
    made = model(vocab_size=vocabulary)
    report = convert(made, recipe, **how)
    assert getattr(made.lm_head, "block", None) == block
    assert ("lm_head" in report.converted) == (block is not None)
    if block is None:
        assert report.left["lm_head"].startswith("the output head")


@pytest.mark.parametrize("vocabulary", [256, 97])
def test_a_tied_head_in_int8_learns(vocabulary):
    made, plain = (model(vocab_size=vocabulary, tie_word_embeddings=True) for _ in range(2))
    convert(made, fused=True)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    loss, gradients = step(made)
    exact, theirs = step(plain)
    assert loss == pytest.approx(exact, abs=0.01)
    near(gradients, theirs, 0.12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("Qwen3", {"attn_implementation": "eager"}),
    ],
)
def test_is_what_its_layers_are(kind, options):
    """The same as the layers one by one, but for what flows between; not what defaults give."""
    loss, gradients = step(fused(kind, **options))
    other, theirs = step(singly(kind, **options))
    assert loss == pytest.approx(other, abs=0.01)
    near(gradients, theirs, 0.15)
    assert error(logits(fused(kind, **options)), logits(singly(kind, **options))) < 0.05


@pytest.mark.parametrize("window", [None, 4])
def test_the_block_of_our_own_is_transformers(window):
    """The same forward, of the same weights: rotary embeddings, groups of heads, windows."""
    kind = "Llama" if window is None else "Mistral"
    options = {"head_dim": 32, "hidden_size": 128, "num_key_value_heads": 1}
    layer = fused(kind, "int8-block32", sliding_window=window, **options)
    own = Int8LlamaBlock(128, 4, 1, 256, window=window, eps=1e-6)
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "projection": "self_attn.o_proj",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    theirs = layer.model.layers[0]
    state = {f"{a}.weight": theirs.get_parameter(f"{b}.weight") for a, b in names.items()}
    own.load_state_dict(state)
    found = []
    with theirs.register_forward_hook(lambda _, given, output: found.extend((*given, output))):
        logits(layer)
    x, expected = (t.reshape(-1, 128).bfloat16() for t in found)
    with torch.no_grad():
        y = own.eval()(Stream.of(x, 32), 2).x
    # theirs rounds each term of a rotation to bf16
    assert error(y.float(), expected.float()) < 0.01
    assert error((y - x).float(), (expected - x).float()) < 0.05


def test_a_window_is_seen():
    wide, narrow = (logits(fused("Mistral", sliding_window=size)) for size in (None, 4))
    assert error(narrow, wide) > 0.05


def test_masks_are_the_model_s():
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[0, :8] = 0
    ours, theirs = (logits(one, attention_mask=mask)[mask.bool()] for one in (fused(), singly()))
    assert error(ours, theirs) < 0.05 < error(logits(singly())[mask.bool()], theirs)


def test_generates_with_a_cache():
    """Token by token, as it reads all of them at once."""
    made = fused().eval()
    ids = batch()[:, :8]
    whole = logits(made, ids)
    cache = transformers.DynamicCache(config=made.config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        turns = [made(ids[:, i : i + 1], past_key_values=cache).logits for i in range(8)]
        written = made.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert error(torch.cat(turns, dim=1).float(), whole) < 0.05
    assert written.shape == (2, 12)


def test_attention_weights_and_hidden_states_can_be_asked_for():
    kinds = {"attn_implementation": "eager"}
    ours, theirs = fused(**kinds), singly(**kinds)
    for _ in range(2):
        found, expected = (
            one.eval()(batch(), output_attentions=True, output_hidden_states=True)
            for one in (ours, theirs)
        )
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(batch(), output_attentions=True, output_hidden_states=True)
    assert len(found.attentions) == 2
    assert len(found.hidden_states) == 3
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert one.shape == other.shape
        assert error(one.float(), other) < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """The same bits, but that gradients are rounded by other draws where it is reentrant."""
    made = fused("Qwen3").train()
    loss, gradients = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, theirs = step(made)
    assert loss == again
    if reentrant:
        near(gradients, theirs, 0.1)
    else:
        assert all(torch.equal(gradient, theirs[name]) for name, gradient in gradients.items())


def test_without_autocast_it_is_its_layers():
    with torch.no_grad():
        assert torch.equal(fused().eval()(batch()).logits, singly().eval()(batch()).logits)


def test_a_layer_replaced_afterwards_is_called():
    ours, theirs = fused(), singly()
    for one in (ours, theirs):
        one.model.layers[1].mlp.up_proj = Doubled(one.model.layers[1].mlp.up_proj)
    assert error(logits(ours), logits(theirs)) < 0.05 < error(logits(fused()), logits(theirs))


def test_cast_to_bf16_afterwards():
    loss, _ = step(fused().to(torch.bfloat16))
    assert loss == pytest.approx(step(model())[0], abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole(kind):
    """All but the loss, of which `transformers` has a warning that Dynamo does not trace.

    Attention is causal and has no mask: the model's forward makes none.
    """
    made = fused(kind)
    other, theirs = step(made, use_cache=False)
    graphs = compiled(made.model, fullgraph=True)
    loss, gradients = step(made, use_cache=False)
    assert attends_causally(graphs)
    assert loss == pytest.approx(other, abs=0.01)
    near(gradients, theirs, 0.12)


PACKED = {"position_ids": torch.arange(32).remainder(20).expand(2, 32)}
PADDED = {"attention_mask": (torch.arange(32) > 7).expand(2, 32).long()}


@pytest.mark.parametrize(
    ("kind", "options", "given", "causal"),
    [
        ("Llama", {}, {}, True),
        ("Llama", {}, PACKED, False),
        ("Llama", {}, PADDED, False),
        ("Mistral", {"sliding_window": 32}, {}, True),
        ("Mistral", {"sliding_window": 8}, {}, False),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, {}, False),
        ("Llama", {"attn_implementation": "eager"}, {}, None),
    ],
)
def test_a_compiled_model_has_no_mask_that_is_causal_alone(kind, options, given, causal):
    """The loss is what it is without torch.compile, where `transformers` looks at the mask."""
    made, other = (fused(kind, num_hidden_layers=1, **options) for _ in range(2))
    loss, gradients = step(other, use_cache=False, **given)
    graphs = compiled(made)
    again, ours = step(made, use_cache=False, **given)
    assert causal is None or attends_causally(graphs) == causal
    assert again == pytest.approx(loss, abs=0.01)
    near(ours, gradients, 0.12)


def test_a_block_that_is_not_fused_has_its_mask():
    made = model()
    assert convert(made, fused=True, keep=["last"]).fused == ("model.layers.0",)
    graphs = compiled(made)
    step(made, use_cache=False)
    assert not attends_causally(graphs)


def test_blocks_that_two_calls_fused_have_no_mask():
    made = model()
    assert convert(made, "int8-kept4", fused=True, keep=["last"]).fused == ("model.layers.0",)
    for _ in range(2):  # the first fuses the other block
        convert(made, fused=True, skip=("model.layers.0",))
    assert len(made.model._forward_pre_hooks) == 1
    graphs = compiled(made)
    step(made, use_cache=False)
    assert attends_causally(graphs)


@pytest.mark.parametrize(("kv_heads", "dynamic"), [(2, True), (4, None)])
def test_any_shape_compiles_to_one_graph(kv_heads, dynamic):
    """Asked of torch.compile, which then takes numbers too as symbols; or of the tokens alone."""
    made = fused(num_key_value_heads=kv_heads)
    graphs = compiled(made, dynamic=dynamic)
    for shape in ((2, 32), (3, 32), (2, 24)):
        ids = torch.randint(96, shape)
        if dynamic is None:
            torch._dynamo.mark_dynamic(ids, (0, 1))
        with torch.autocast("cpu", torch.bfloat16):
            made(ids, labels=ids, use_cache=False).loss.backward()
    assert len(graphs) == 2


@pytest.mark.parametrize("ours", [False, True])
def test_codes_are_of_the_weights_as_they_are(ours):
    """After steps of torch's AdamW and of ours, which renews each layer's codes itself."""
    made = fused()
    rate = {"lr": 0.02}
    optimizer = torch.optim.AdamW(made.parameters(), **rate)
    if ours:
        optimizer = AdamW(made.parameters(), model=made, **rate)
    losses = []
    for _ in range(4):
        losses.append(step(made)[0])
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    fresh = copy.deepcopy(made)
    assert error(logits(made), logits(fresh)) == 0.0


def test_state_copies_and_pickles(tmp_path):
    made = fused()
    assert made.state_dict().keys() == model().state_dict().keys()
    made.save_pretrained(tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, DecoderBlock) for module in plain.modules())
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert step(other)[0] == step(made)[0]


def test_hidden_states_are_saved_as_plain_tensors(tmp_path):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = fused()(batch(), output_hidden_states=True).hidden_states[1]
    torch.save(hidden, tmp_path / "hidden.pt")
    assert torch.equal(torch.load(tmp_path / "hidden.pt", weights_only=True), hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_go_by_the_name_of_a_class_find_it(kind):
    made = fused(kind)
    assert type(made.model.layers[0]).__name__ in made._no_split_modules
    assert "int8, flow=32" in repr(made)


def test_again_changes_nothing():
    made = fused()
    before = step(made)[0]
    report = convert(made, fused=True)
    assert report.fused == ()
    assert set(report.single.values()) == {"fused already"}
    assert step(made)[0] == before


def test_hidden_states_between_blocks_have_gradients_and_hooks(monkeypatch):
    """And their codes go from block to block all the same."""
    made, seen, quantised = fused(), [], []
    own = flow.quantised_gradient
    monkeypatch.setattr(
        flow, "quantised_gradient", lambda *args: quantised.append(args) or own(*args)
    )

    def watched(module, args, output):
        output.register_hook(lambda g: seen.append(g.norm().item()))
        output.retain_grad()
        seen.append(output)

    with made.model.layers[0].register_forward_hook(watched):
        _, expected = step(made)
    assert seen[1] > 0
    assert seen[0].grad.norm().item() == pytest.approx(seen[1])
    # Of query, key and value in both blocks, of which there are other numbers; of the last stream.
    assert len(quantised) == 3

    def halved(module, args, output):
        output.register_hook(lambda g: g / 2)

    with made.model.layers[0].register_forward_hook(halved):
        _, found = step(made)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert error(2 * found[name], expected[name]) < 0.1


def test_frozen_layers_have_no_gradient_made(monkeypatch):
    made, products = fused(), []
    own = flow.weight_gradient
    monkeypatch.setattr(flow, "weight_gradient", lambda *a: products.append(a[2]) or own(*a))
    learns = made.model.layers[1].mlp.up_proj.weight
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("norm" in name or parameter is learns)
    ids = batch()
    with torch.autocast("cpu", torch.bfloat16):
        made(ids, labels=ids).loss.backward()
    assert len(products) == 1
    assert products[0] is learns
    assert learns.grad is not None
    assert made.model.layers[1].mlp.gate_proj.weight.grad is None


def test_arguments_by_position():
    layer, x = fused().model.layers[0].eval(), torch.randn(2, 8, 96)
    angles = fused().model.rotary_emb(x, torch.arange(8)[None])
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, attention_mask=mask, position_embeddings=angles)
        assert torch.equal(layer(x, mask, None, None, False, angles), expected)


@pytest.mark.parametrize("what", ["activation", "mlp", "norm"])
def test_another_part_put_in_afterwards_is_called(what):
    ours, theirs = fused(), singly()
    for one in (ours, theirs):
        layer = one.model.layers[1]
        if what == "activation":
            layer.mlp.act_fn = torch.nn.ReLU()
        elif what == "mlp":
            layer.mlp = torch.nn.Identity()
        else:
            layer.input_layernorm = torch.nn.RMSNorm(96, 1e-1)
    assert error(logits(ours), logits(theirs)) < 0.05 < error(logits(fused()), logits(theirs))


def test_blocks_of_several_sides_and_replaced_forwards_stay_single():
    made = model()
    convert(made, "int8", skip=("model.layers.0.mlp.down_proj",))
    made.model.layers[1].forward = made.model.layers[1].forward
    report = convert(made, "int8-block32", fused=True)
    assert report.single == {
        "model.layers.0": "its linear layers have blocks of different sides",
        "model.layers.1": "its forward was replaced",
    }
    assert step(made)[0] == pytest.approx(step(model())[0], abs=0.01)


PARTS = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS)
def test_a_subclass_with_a_forward_of_its_own_is_called(kind, part):
    ours, theirs, plain = model(kind), model(kind), model(kind)
    for one in (ours, theirs):
        doubling(getattr(one.model.layers[1], part))
    report = convert(ours, fused=True)
    assert report.fused == ("model.layers.0",)
    assert report.single == {
        "model.layers.1": "the forward of a Sub in it is not its library's",
    }
    loss, _ = step(ours)
    assert loss == pytest.approx(step(theirs)[0], abs=0.01)
    assert error(logits(ours), logits(theirs)) < 0.05 < error(logits(plain), logits(theirs))


def test_a_subclass_that_comes_afterwards_is_called():
    ours, theirs = fused(), model()
    for one in (ours, theirs):
        doubling(one.model.layers[1].mlp)
    assert error(logits(ours), logits(theirs)) < 0.05


def test_a_forward_put_in_the_place_of_a_class_s_is_called(monkeypatch):
    """Of an MLP, and of a whole layer."""
    for kind in (type(model().model.layers[0].mlp), type(model().model.layers[0])):
        with monkeypatch.context() as patch:
            theirs = kind.forward
            patch.setattr(kind, "forward", lambda *args, f=theirs, **kw: 2 * f(*args, **kw))
            ours = model()
            assert convert(ours, fused=True).fused == ()
            assert error(logits(ours), logits(model())) < 0.05


def test_an_activation_that_has_silu_s_name_is_called():
    class SiLU(torch.nn.Module):
        def forward(self, x):
            return 2 * torch.nn.functional.silu(x)

    ours, theirs = model(), model()
    for one in (ours, theirs):
        one.model.layers[1].mlp.act_fn = SiLU()
    assert convert(ours, fused=True).fused == ("model.layers.0",)
    assert error(logits(ours), logits(theirs)) < 0.05


@pytest.mark.parametrize("part", PARTS)
def test_a_subclass_without_a_forward_of_its_own_is_fused(part):
    made = model()
    doubling(getattr(made.model.layers[1], part), own=False)
    assert convert(made, fused=True).single == {}
    assert torch.equal(logits(made), logits(fused()))


@pytest.mark.parametrize(
    ("options", "how", "reason"),
    [
        ({"hidden_act": "gelu"}, {}, "its activation is GELUActivation: expected SiLU"),
        ({"dtype": torch.bfloat16}, {}, "its parameters are not all float32"),
        (
            {},
            {"skip": ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj")},
            "not all of its linear layers are in INT8",
        ),
        ({"head_dim": 24}, {}, "96 outputs: expected a multiple of 128"),
        ({"intermediate_size": 96}, {}, "96 outputs: expected a multiple of 128"),
        ({}, {"skip": ("model.layers",)}, "asked to"),
    ],
)
def test_blocks_that_cannot_be(options, how, reason):
    report = convert(model(**options), fused=True, **how)
    assert report.single == dict.fromkeys(("model.layers.0", "model.layers.1"), reason)
    assert f"not fused model.layers.0 and 1 more: {reason}" in str(report)


def test_blocks_of_other_models_are_named():
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    report = convert(transformers.BertModel(config), fused=True)
    assert report.single == {"encoder.layer.0": "BertLayer has no such form"}
