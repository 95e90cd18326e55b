"""What is put on the modules in a fused block, or in their place, counts as in one not fused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from jetfire.nn import convert
from jetfire.tests.language_models import batch, compiled, error, logits, step

transformers = pytest.importorskip("transformers", reason="needs transformers")

from jetfire.nn import decoder_block, gpt2_block  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# Of the blocks, and of a block's attention, one of its linear layers, a norm and the activation.
NAMES = {
    "gpt2": ("transformer.h", "attn", "mlp.c_fc", "ln_2", "mlp.act"),
    "llama": (
        "model.layers",
        "self_attn",
        "mlp.down_proj",
        "post_attention_layernorm",
        "mlp.act_fn",
    ),
}
kinds = pytest.mark.parametrize("kind", list(NAMES))


def model(kind, **options):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=96, **{**sizes, **drops, **options})
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, **sizes, **heads, **options)
    return transformers.LlamaForCausalLM(config)


def converted(kind, fused=True, **options):
    made = model(kind, **options)
    report = convert(made, "int8-block32" if kind == "llama" else "int8", fused=fused, head=False)
    assert len(report.fused) == 2 * fused
    return made


def blocks(made):
    return made.get_submodule(NAMES["gpt2" if hasattr(made, "transformer") else "llama"][0])


def is_as_its_layers(kind, change):
    """What is changed in each block gives the logits of layers that are called singly."""
    ours, theirs = (converted(kind, fused) for fused in (True, False))
    for one in (ours, theirs):
        for block in blocks(one):
            change(block)
    assert torch.equal(logits(ours), logits(theirs))


# --- hooks and forwards of modules in a block


@kinds
def test_hooks_of_all_kinds_run_on_every_module_in_a_block(kind):
    """As often as they do where its layers are called singly."""
    found = []
    for fused in (True, False):
        made, seen = converted(kind, fused), []
        for name, module in blocks(made)[0].named_modules():
            for register in (
                module.register_forward_hook,
                module.register_forward_pre_hook,
                module.register_full_backward_hook,
                module.register_full_backward_pre_hook,
            ):
                what = register.__name__, name
                register(lambda *_, seen=seen, what=what: seen.append(what))
        step(made)
        found.append(sorted(seen))
    assert found[0] == found[1]
    assert len({name for _, name in found[0]}) >= 12


@kinds
@pytest.mark.parametrize("which", range(1, 5))
@pytest.mark.parametrize("how", ["hook", "pre_hook", "forward"])
def test_what_a_module_s_hook_or_own_forward_changes(kind, which, how):
    name = NAMES[kind][which]

    def halved(given):
        first, *rest = given if isinstance(given, tuple) else (given,)
        return (first / 2, *rest) if isinstance(given, tuple) else first / 2

    def change(block):
        module = block.get_submodule(name)
        forward = module.forward
        if how == "hook":
            module.register_forward_hook(lambda module, args, output: halved(output))
        elif how == "pre_hook":
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (halved(args) if args else args, kwargs),
                with_kwargs=True,
            )
        else:
            module.forward = lambda *args, **kwargs: halved(forward(*args, **kwargs))

    is_as_its_layers(kind, change)


@kinds
def test_a_hook_s_removal_makes_a_block_fused_again(kind):
    made = converted(kind)
    before = logits(made)
    handle = blocks(made)[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    assert error(logits(made), before) > 0.05
    handle.remove()
    assert torch.equal(logits(made), before)


@kinds
def test_an_attention_hook_of_no_module_runs(kind):
    """As of a function that `exec` makes."""
    seen = []

    def hook(module, args, output):
        seen.append(output[0].shape)

    hook.__module__ = None
    made = converted(kind)
    getattr(blocks(made)[0], NAMES[kind][1]).register_forward_hook(hook)
    step(made)
    assert seen == [(2, 32, 64)]


@kinds
def test_the_report_says_what_was_on_a_module_before(kind):
    made, seen = model(kind), []
    first, second = blocks(made)
    first.mlp.register_forward_hook(lambda *_: seen.append(1))
    second.mlp.forward = partial(type(second.mlp).forward, second.mlp)
    report = convert(made, "int8-block32", fused=True)
    mlp = type(first.mlp).__name__
    assert list(report.single.values()) == [
        f"a {mlp} in it has hooks",
        f"the forward of a {mlp} in it was replaced",
    ]
    step(made)
    assert seen == [1]


@kinds
@pytest.mark.parametrize("how", ["prune", "weight_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_makes_learns(kind, how):
    """Pruned, and normed in torch's old way: both make the weight in a hook before each forward."""
    found = []
    for fused in (True, False):
        made = converted(kind, fused)
        layer = made.get_submodule(f"{NAMES[kind][0]}.0.{NAMES[kind][2]}")
        if how == "prune":
            prune.l1_unstructured(layer, "weight", 0.5)
        else:
            nn.utils.weight_norm(layer)
        optimizer = torch.optim.SGD(made.parameters(), 0.5)
        losses = []
        for _ in range(3):
            losses.append(step(made)[0])
            optimizer.step()
        learnt = layer.weight_orig if how == "prune" else layer.weight_v
        assert learnt.grad.abs().max() > 0
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=0.02)
    assert found[0][2] < found[0][0]


@kinds
def test_attention_weights_come_of_a_fused_block(kind):
    """By `transformers`' own hooks, which the call installs and leaves; compiled as well."""
    made = converted(kind, attn_implementation="eager").eval()
    before = logits(made)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert len(made(batch(), output_attentions=True).attentions) == 2
    attention = getattr(blocks(made)[0], NAMES[kind][1])
    assert attention._forward_hooks
    rules = gpt2_block if kind == "gpt2" else decoder_block
    assert rules._why_not_now(blocks(made)[0]) is None
    assert torch.equal(logits(made), before)
    compiled(made, fullgraph=True)
    assert error(logits(made, use_cache=False), before) < 0.02


@kinds
def test_a_model_offloaded_by_accelerate(kind):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    ours, theirs = (converted(kind, fused) for fused in (True, False))
    expected = logits(theirs)
    accelerate.cpu_offload(ours, execution_device="cpu")
    assert torch.equal(logits(ours), expected)


# --- what GPT-2's two branches have of their own


def drops(made):
    """Whether two forwards differ."""
    ids = batch()  # which sets the seed
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        one, other = (made(ids).logits for _ in range(2))
    return not torch.equal(one, other)


def dropouts(made):
    return [module for module in made.modules() if type(module) is nn.Dropout]


def test_dropout_goes_by_the_mode_of_each_dropout():
    made = converted("gpt2", resid_pdrop=0.5).train()
    assert drops(made)
    for dropout in dropouts(made):
        dropout.eval()
    assert not drops(made)
    made.eval()
    assert not drops(made)
    for dropout in dropouts(made):
        dropout.train()
    assert drops(made)
    assert gpt2_block._why_not_now(blocks(made)[0]) is None


def test_dropout_in_evaluation_has_gradients():
    made = converted("gpt2", resid_pdrop=0.5).eval()
    for dropout in dropouts(made):
        dropout.train()
    _, gradients = step(made)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("branch", ["attn.resid_dropout", "mlp.dropout"])
@pytest.mark.parametrize("how", ["p", "mode"])
def test_one_branch_alone_drops(branch, how):
    made = converted("gpt2", resid_pdrop=0.5).train()
    for block in blocks(made):
        for dropout in (block.attn.resid_dropout, block.mlp.dropout):
            if dropout is not block.get_submodule(branch):
                dropout.p, dropout.training = (0.0, True) if how == "p" else (0.5, False)
    assert drops(made)
    assert gpt2_block._why_not_now(blocks(made)[0]) == "its dropouts differ"


@pytest.mark.parametrize("training", [True, False])
def test_the_report_says_that_dropouts_differ(training):
    made = model("gpt2", resid_pdrop=0.5).train(training)
    blocks(made)[1].mlp.dropout.p = 0.1
    assert convert(made, fused=True).single == {"transformer.h.1": "its dropouts differ"}


def test_all_is_dropped():
    """What no fused block does."""
    made = converted("gpt2", resid_pdrop=0.5).train()
    for dropout in dropouts(made):
        dropout.p = 1.0
    assert not drops(made)


def test_attention_s_dropout_goes_by_attention_s_mode():
    """As it does in `transformers`."""
    made = converted("gpt2", attn_pdrop=0.5).train()
    for block in blocks(made):
        block.attn.eval()
    assert not drops(made)
    made.eval()
    for block in blocks(made):
        block.attn.train()
    assert drops(made)


def test_a_dropout_replaced_is_called():
    made = converted("gpt2", resid_pdrop=0.5).train()
    for block in blocks(made):
        block.attn.resid_dropout, block.mlp.dropout = nn.Identity(), nn.Identity()
    assert not drops(made)


@kinds
@pytest.mark.parametrize("which", [0, 1])
def test_the_eps_of_either_norm_counts(kind, which):
    norms = ("ln_1", "ln_2")
    if kind == "llama":
        norms = ("input_layernorm", "post_attention_layernorm")
    eps = "eps" if kind == "gpt2" else "variance_epsilon"
    is_as_its_layers(kind, lambda block: setattr(getattr(block, norms[which]), eps, 100.0))


# --- modules replaced


class Nothing(nn.Module):
    def forward(self, x, *args, **kwargs):
        return 0 * x


class Halved(gpt2_block.modeling_gpt2.GPT2MLP):
    """An MLP with the layers of another, and a forward of its own."""

    def forward(self, x):
        return super().forward(x) / 2


@kinds
@pytest.mark.parametrize("which", ["mlp", "norm", "activation"])
def test_a_module_replaced_is_called(kind, which):
    name = {"mlp": "mlp", "norm": NAMES[kind][3], "activation": NAMES[kind][4]}[which]
    new = Nothing() if which == "mlp" else nn.Identity()

    def change(block):
        block.set_submodule(name, new)

    is_as_its_layers(kind, change)


@pytest.mark.parametrize("norm", [nn.LayerNorm(64, bias=False), nn.LayerNorm(64, 1.0, False)])
def test_a_norm_without_parameters_is_called(norm):
    def change(block):
        block.ln_1 = block.ln_2 = norm

    is_as_its_layers("gpt2", change)


def test_an_mlp_of_another_class_is_called():
    def change(block):
        block.mlp.__class__ = Halved

    is_as_its_layers("gpt2", change)


@kinds
def test_norms_tuned_by_peft(kind):
    peft = pytest.importorskip("peft", reason="needs peft")
    targets = ["ln_1", "ln_2"] if kind == "gpt2" else ["input_layernorm", NAMES[kind][3]]
    found = []
    for fused in (True, False):
        made = converted(kind, fused)
        tuned = peft.get_peft_model(made, peft.LNTuningConfig(target_modules=targets))
        ids = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append(loss.item())
        assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)
    assert found[0] == pytest.approx(found[1], abs=1e-3)


# --- fallback


@kinds
def test_layers_with_fallback_keep_it(kind):
    made = model(kind)
    convert(made, "int8-fallback", head=False)
    before = step(made)
    report = convert(made, "int8", fused=True, head=False)
    assert set(report.single.values()) == {"its layers have fallback"}
    assert step(made)[0] == before[0]


@kinds
def test_fallback_given_afterwards_counts(kind):
    made, other = converted(kind), model(kind)
    convert(other, "int8-fallback", head=False)
    for block, theirs in zip(blocks(made), blocks(other), strict=True):
        for name, layer in theirs.named_modules():
            if getattr(layer, "fallback", None) is not None:
                block.set_submodule(name, layer)
    assert torch.equal(logits(made), logits(other))


# --- a forward of its own that a layer has when it is converted


def test_a_layer_with_a_forward_of_its_own_is_left():
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    made[0].forward = lambda x: 0 * x
    report = convert(made)
    assert report.left == {"0": "its forward was replaced"}
    assert report.converted == ("1",)
    assert made[0](torch.randn(2, 64)).abs().max() == 0
