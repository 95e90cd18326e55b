"""GPT-2 of `transformers` with INT8 between the layers of its blocks, on the CPU."""

import copy
import pickle

import pytest
import torch

from jetfire.core.errors import UsageError
from jetfire.nn import convert
from jetfire.tests.language_models import (
    Doubled,
    attends_causally,
    batch,
    calls,
    compiled,
    doubling,
    error,
    logits,
    near,
    step,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")

from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

from jetfire.nn.gpt2_block import GPT2Block  # noqa: E402
from jetfire.nn.loss import causal_lm_loss  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 32}


def model(dropout=0.0, dtype=torch.float32, **options):
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**SIZES, **drops, **options)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def fused(**options):
    made = model(**options)
    report = convert(made, fused=True)
    assert report.fused == ("transformer.h.0", "transformer.h.1")
    assert report.single == {}
    return made


def test_loss_and_gradients_are_near_float():
    loss, gradients = step(fused())
    exact, theirs = step(model())
    assert loss == pytest.approx(exact, abs=0.01)
    near(gradients, theirs, 0.12)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_is_what_its_layers_are(activation):
    """The same as the layers one by one, but for what flows between."""
    loss, gradients = step(fused(activation_function=activation))
    singly = model(activation_function=activation)
    convert(singly)
    other, theirs = step(singly)
    assert loss == pytest.approx(other, abs=0.01)
    near(gradients, theirs, 0.15)


def test_the_stream_goes_from_block_to_block(monkeypatch):
    """Codes and statistics are made once by the block before; the first has none before it."""
    made, calls = fused(), []
    monkeypatch.setattr(
        "jetfire.nn.flow.int8_quantize",
        lambda x, **how: calls.append(x.shape) or _quantize(x, **how),
    )
    from jetfire.ops import int8_quantize as _quantize

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        made(batch())
    # Of the embeddings once; of attention's output in each block.
    assert len(calls) == 3


def test_hidden_states_changed_between_blocks_are_seen():
    made = fused()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = made(batch()).logits

        def double(module, args, output):
            return output.mul_(2.0)

        with made.transformer.h[0].register_forward_hook(double):
            after = made(batch()).logits
    assert not torch.equal(before, after)


def test_masks_are_the_model_s():
    ids, mask = batch(), torch.ones(2, 32, dtype=torch.long)
    mask[0, :8] = 0
    singly = model()
    convert(singly)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = fused().eval()(ids, attention_mask=mask).logits.float()
        theirs = singly.eval()(ids, attention_mask=mask).logits.float()
        unmasked = singly(ids).logits.float()
    error = (ours - theirs)[mask.bool()].norm() / theirs[mask.bool()].norm()
    assert error < 0.05 < (unmasked - theirs)[mask.bool()].norm() / theirs[mask.bool()].norm()


def test_generates_with_a_cache():
    made = fused().eval()
    with torch.autocast("cpu", torch.bfloat16):
        kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        cached = made.generate(batch()[:, :8], **kwargs)
        whole = made.generate(batch()[:, :8], use_cache=False, **kwargs)
    assert cached.shape == whole.shape == (2, 12)


def test_checkpointing_changes_no_bit():
    made = fused(dropout=0.1).train()
    loss, gradients = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    again, theirs = step(made)
    assert loss == again
    for name, gradient in gradients.items():
        assert torch.equal(gradient, theirs[name]), name


def test_reentrant_checkpointing_rounds_gradients_by_other_draws():
    """Codes of a gradient go from block to block, but not into another graph."""
    made = fused(dropout=0.1).train()
    loss, gradients = step(made)
    made.gradient_checkpointing_enable({"use_reentrant": True})
    again, theirs = step(made)
    assert loss == again
    near(gradients, theirs, 0.1)


def test_without_autocast_it_is_its_layers():
    made, singly = fused().eval(), model()
    convert(singly, head=True)
    with torch.no_grad():
        assert torch.equal(made(batch()).logits, singly.eval()(batch()).logits)


def test_inference_mode():
    made = fused().eval()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            expected = made(batch()).logits
        with torch.inference_mode():
            assert torch.equal(made(batch()).logits, expected)


def test_a_layer_replaced_afterwards_is_called():
    made, singly = fused(), model()
    convert(singly)
    for one in (made, singly):
        mlp = one.transformer.h[1].mlp
        mlp.c_fc = Doubled(mlp.c_fc)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (one.eval()(batch()).logits.float() for one in (made, singly))
        without = fused().eval()(batch()).logits.float()
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 0.05 < (without - theirs).norm() / theirs.norm()


def test_cast_to_bf16_afterwards():
    made = fused().to(torch.bfloat16)
    loss, _ = step(made)
    assert loss == pytest.approx(step(model())[0], abs=0.05)


def test_compiles_whole():
    """The loss too: of `transformers`' own, a warning breaks the graph."""
    made = fused()
    other, theirs = step(made, use_cache=False)
    torch._dynamo.reset()
    made.compile(fullgraph=True, backend="aot_eager")
    loss, gradients = step(made, use_cache=False)
    assert loss == pytest.approx(other, abs=0.01)
    near(gradients, theirs, 0.12)


@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones(2, 32)}])
def test_a_compiled_model_has_no_mask_that_is_causal_alone(given):
    made, other = fused(), fused()
    loss, gradients = step(other, use_cache=False, **given)
    graphs = compiled(made)
    again, ours = step(made, use_cache=False, **given)
    assert attends_causally(graphs) == (not given)
    assert again == pytest.approx(loss, abs=0.01)
    near(ours, gradients, 0.12)


def test_any_shape_compiles_to_one_graph():
    made = fused()
    graphs = compiled(made, dynamic=True)
    for shape in ((2, 32), (3, 32), (2, 24)):
        ids = torch.randint(96, shape)
        with torch.autocast("cpu", torch.bfloat16):
            made(ids, labels=ids, use_cache=False).loss.backward()
    assert len(graphs) == 2


def test_a_compiler_draws_a_block_s_keys_once():
    """Inductor would draw them again for each reader: those have what an operator returned."""
    made = fused()
    graphs = compiled(made)
    step(made, use_cache=False)
    draws = calls(graphs, "aten.randint")
    assert len(draws) == 3  # of two blocks and the head
    for drawn in draws:
        assert [user.target for user in drawn.users] == [torch.ops.jetfire.held.default]


def test_a_block_after_a_checkpointed_one_gives_it_gradients():
    made = fused().train()
    made.gradient_checkpointing_enable({"use_reentrant": True})
    made.transformer.h[1].gradient_checkpointing = False
    _, gradients = step(made)
    assert gradients["transformer.h.0.mlp.c_fc.weight"].abs().max() > 0


def test_state_copies_and_pickles(tmp_path):
    made = fused()
    assert made.state_dict().keys() == model().state_dict().keys()
    made.save_pretrained(tmp_path)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert not any(isinstance(module, GPT2Block) for module in plain.modules())
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert step(other)[0] == step(made)[0]


@pytest.mark.parametrize("positions", [False, True])
def test_nobody_looks_for_several_sequences(positions, monkeypatch):
    """For that the host waits for the GPU. Only where positions are given may there be some."""
    from transformers import masking_utils

    made, looks, look = fused(), [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils,
        "find_packed_sequence_indices",
        lambda given: looks.append(given.shape) or look(given),
    )
    x = batch()
    given = {"position_ids": torch.arange(x.shape[1])[None]} if positions else {}
    plain = model().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = made.eval()(x, use_cache=False, **given).logits
        assert bool(looks) == positions
        theirs = plain(x, use_cache=False, **given).logits
    assert looks
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_policies_that_go_by_the_name_of_a_class_find_it():
    made = fused()
    assert isinstance(made.transformer.h[0], GPT2Block)
    assert type(made.transformer.h[0]).__name__ in made._no_split_modules
    assert "int8, flow=32" in repr(made)


def test_again_changes_nothing():
    made = fused()
    before = step(made)[0]
    report = convert(made, fused=True)
    assert report.fused == ()
    assert step(made)[0] == before


@pytest.mark.parametrize("part", ["attn", "mlp", "ln_1", "ln_2"])
def test_a_subclass_with_a_forward_of_its_own_is_called(part):
    ours, theirs = model(), model()
    for one in (ours, theirs):
        doubling(getattr(one.transformer.h[1], part))
    report = convert(ours, fused=True)
    assert report.fused == ("transformer.h.0",)
    assert list(report.single) == ["transformer.h.1"]
    assert error(logits(ours), logits(theirs)) < 0.05


@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_a_subclass_without_a_forward_of_its_own_is_fused(part):
    made = model()
    doubling(getattr(made.transformer.h[1], part), own=False)
    assert convert(made, fused=True).single == {}
    assert torch.equal(logits(made), logits(fused()))


def test_a_forward_put_in_the_place_of_a_class_s_is_called(monkeypatch):
    for kind in (type(model().transformer.h[0].mlp), type(model().transformer.h[0])):
        with monkeypatch.context() as patch:
            theirs = kind.forward
            patch.setattr(kind, "forward", lambda *args, f=theirs, **kw: 2 * f(*args, **kw))
            ours = model()
            assert convert(ours, fused=True).fused == ()
            assert error(logits(ours), logits(model())) < 0.05


@pytest.mark.parametrize(
    ("options", "how", "reason"),
    [
        ({"activation_function": "relu"}, {}, "its activation is ReLU: expected a GELU"),
        ({"dtype": torch.bfloat16}, {}, "its parameters are not all float32"),
        (
            {},
            {"skip": ("transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn")},
            "not all of its linear layers are in INT8",
        ),
        ({}, {"skip": ("transformer.h.0", "transformer.h.1")}, "asked to"),
        ({"add_cross_attention": True}, {}, "cross attention"),
    ],
)
def test_blocks_that_cannot_be(options, how, reason):
    report = convert(model(**options), fused=True, **how)
    assert report.single == dict.fromkeys(("transformer.h.0", "transformer.h.1"), reason)
    assert f"not fused transformer.h.0 and 1 more: {reason}" in str(report)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"recipe": "int4-hq"}, "fused=True with recipe=int4-hq: expected an INT8 recipe"),
        ({"frozen": True}, "frozen=True fused=True: expected one of them"),
    ],
)
def test_refused(how, message):
    with pytest.raises(UsageError, match=message):
        convert(model(), fused=True, **how)


IGNORED = -100
LABELS = batch().index_fill(1, torch.tensor([5, 9]), IGNORED)


@pytest.mark.parametrize(
    "options",
    [
        {"labels": LABELS},
        {"labels": LABELS, "num_items_in_batch": 7},
        {"labels": LABELS, "num_items_in_batch": torch.tensor(7)},
        {"labels": LABELS.where(LABELS != IGNORED, 3), "ignore_index": 3},
        {"labels": None, "shift_labels": LABELS},
        {"labels": torch.full_like(LABELS, IGNORED)},
    ],
)
def test_the_loss_is_that_of_transformers(options):
    """With its gradient, of the same logits; all ignored is NaN for both."""
    torch.manual_seed(2)
    logits = (3 * torch.randn(2, 32, 96)).bfloat16()
    found = []
    for loss_of in (causal_lm_loss, ForCausalLMLoss):
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf, vocab_size=96, **options)
        loss.backward()
        assert loss.dtype == torch.float32
        assert leaf.grad.dtype == torch.bfloat16
        found.append((loss.detach(), leaf.grad.float()))
    (loss, gradient), (other, its_gradient) = found
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(gradient, its_gradient, rtol=2**-7, atol=1e-7, equal_nan=True)


def test_the_loss_is_fused_with_the_blocks():
    made = model()
    report = convert(made, fused=True)
    assert report.losses == ("",)
    assert "fused 2 blocks and the loss" in str(report)
    assert made.loss_function is causal_lm_loss
    wrapped = torch.nn.ModuleDict({"lm": model()})
    assert convert(wrapped, fused=True).losses == ("lm",)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.loss_function is causal_lm_loss


def test_a_loss_of_one_s_own_stays():
    mine = model()
    mine.loss_function = lambda logits, labels, **kwargs: logits.float().square().mean()
    loss = mine.loss_function
    assert convert(mine, fused=True).losses == ()
    assert mine.loss_function is loss
    assert convert(model(), fused=False).losses == ()
    left = convert(model(), fused=True, skip=("transformer.h.0", "transformer.h.1"))
    assert left.losses == ()
