"""GPT-2's weights from and to transformers' folders, and sampling."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from jetfire.gpt2 import sample, tokenizers, weights
from jetfire.gpt2.model import GPT2, Shape
from jetfire.ops.errors import JetfireError, UsageError

SHAPE = Shape(layers=2, heads=2, width=32, context=24, vocabulary=70)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the oracle is not installed")


@pytest.fixture
def theirs(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=24, vocab_size=70, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():  # biases too, which begin at 0
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _ids(rows: int = 3, tokens: int = 24) -> torch.Tensor:
    return torch.randint(70, (rows, tokens), generator=torch.Generator().manual_seed(1))


def _ours(folder) -> GPT2:
    model = GPT2(SHAPE).eval()
    weights.load(model, folder)
    return model


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin", "old"])
def test_logits_are_those_of_transformers(theirs, tmp_path, layout):
    theirs.save_pretrained(tmp_path, max_shard_size="30KB" if layout == "sharded" else "5GB")
    if layout in ("bin", "old"):
        (tmp_path / "model.safetensors").unlink()
        state = dict(theirs.state_dict())
        if layout == "old":  # the first published files: no prefix, masks, no head
            state = {k.removeprefix("transformer."): v for k, v in state.items()}
            del state["lm_head.weight"]
            state["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
            state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        torch.save(state, tmp_path / "pytorch_model.bin")
    assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "sharded")
    ours = _ours(tmp_path)
    with torch.no_grad():
        expected = theirs(_ids()).logits
        found = ours(_ids())
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(ours.tokens.weight) == 128
    assert not ours.tokens.weight[70:].any()


def test_transformers_reads_what_is_saved(transformers, tmp_path):
    torch.manual_seed(2)
    model = GPT2(SHAPE).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    fields = dataclasses.asdict(SHAPE)
    assert weights.save_transformers(tmp_path, fields, model.state_dict()) == tmp_path
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(_ids()), theirs(_ids()).logits, rtol=1e-4, atol=1e-4)
    again, state = weights.read_transformers(tmp_path)
    assert again == fields
    for name, value in state.items():
        valid = 70 if name == "tokens.weight" else len(value)
        assert torch.equal(value[:valid], model.state_dict()[name][:valid])
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_shorter_context_takes_the_first_positions(tmp_path):
    model = GPT2(SHAPE)
    weights.save_transformers(tmp_path, dataclasses.asdict(SHAPE), model.state_dict())
    short = GPT2(dataclasses.replace(SHAPE, context=10))
    weights.load(short, tmp_path)
    assert torch.equal(short.positions.weight, model.positions.weight[:10])
    with pytest.raises(UsageError, match=r"has .*context=24; the model expects .*context=25"):
        weights.load(GPT2(dataclasses.replace(SHAPE, context=25)), tmp_path)
    with pytest.raises(UsageError, match=r"has layers=2, .*; the model expects layers=1, "):
        weights.load(GPT2(dataclasses.replace(SHAPE, layers=1)), tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "model_type 'llama': expected 'gpt2'"),
        ({"activation_function": "relu"}, "expected 'gelu_new' or 'gelu_pytorch_tanh'"),
        ({"n_inner": 100}, "n_inner 100: expected 128"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False: expected True"),
        ({"n_layer": None}, "is not of a GPT-2"),
        ({"n_layer": 3}, r"no weight h\.2\."),
        ({"n_layer": 1}, r"weight h\.1\..* has no place"),
        ({"n_embd": 16}, "expected .* as config.json has it"),
    ],
)
def test_what_is_not_our_gpt2_is_refused(tmp_path, config, says):
    weights.save_transformers(tmp_path, dataclasses.asdict(SHAPE), GPT2(SHAPE).state_dict())
    held = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(held | config))
    with pytest.raises(UsageError, match=says):
        weights.read_transformers(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path):
    weights.save_transformers(tmp_path, dataclasses.asdict(SHAPE), GPT2(SHAPE).state_dict())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:5000])
    with pytest.raises(UsageError, match="cannot read the weights"):
        weights.read_transformers(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"expected model\.safetensors or pytorch_model\.bin"):
        weights.read_transformers(tmp_path)
    for content in (b"", b"garbage", b"PK\x03\x04"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UsageError, match="cannot read the weights"):
            weights.read_transformers(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        weights.read_transformers(tmp_path)
    with pytest.raises(UsageError, match=r"config\.json: No such file"):
        weights.read_transformers(tmp_path / "nowhere")


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return (print, ("harm",))

    weights.save_transformers(tmp_path, dataclasses.asdict(SHAPE), GPT2(SHAPE).state_dict())
    (tmp_path / "model.safetensors").unlink()
    torch.save({"wte.weight": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="cannot read the weights"):
        weights.read_transformers(tmp_path)


# --- sampling -------------------------------------------------------------------------------------


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(3)
    return GPT2(SHAPE)


def test_the_likeliest_tokens_are_those_of_transformers(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ids = _ids(2, 6)
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(sample.generate(_ours(tmp_path), ids, 12, temperature=0), expected)


def test_samples_repeat_with_their_seed_and_pass_the_context(model):
    ids = _ids(2, 5)
    model.train()
    found = sample.generate(model, ids, 30, seed=1)
    assert model.training
    assert found.shape == (2, 35)
    assert torch.equal(found[:, :5], ids)
    assert found.max() < 70
    torch.rand(3)  # another state of the default generator changes nothing
    assert torch.equal(found, sample.generate(model, ids, 30, seed=1))
    assert not torch.equal(found, sample.generate(model, ids, 30, seed=2))


def test_draws_follow_the_models_predictions():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40_000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = sample._draw(logits, 0.5, 3, generator).flatten()
    counts = np.bincount(drawn.numpy(), minlength=4) / 40_000
    expected = np.append(np.exp([0.0, 2.0, 4.0]), 0)
    # Six standard deviations of a share of 40 000 draws are below 0.015.
    np.testing.assert_allclose(counts, expected / expected.sum(), atol=0.015)
    assert counts[3] == 0


def test_text_goes_on_from_a_prompt_or_begins_a_document(model):
    tokenizer = tokenizers.Characters(map(chr, (10, *range(32, 101))))
    assert tokenizer.vocabulary == 70
    written = sample.text(model, tokenizer, "HELLO", 20)
    assert written.startswith("HELLO")
    assert len(written) == 25
    assert len(sample.text(model, tokenizer, "", 20)) == 20
    with pytest.raises(UsageError, match="'é' is not in the vocabulary"):
        sample.text(model, tokenizer, "é", 20)


def test_what_cannot_be_sampled_says_so(model):
    for given, says in (
        ({"count": 0}, "0 tokens to sample"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": 0}, "top-k 0"),
        ({"ids": torch.empty(1, 0, dtype=torch.int64)}, "at least one token"),
    ):
        with pytest.raises(UsageError, match=says):
            sample.generate(**{"model": model, "ids": _ids(1, 3), "count": 2} | given)
    model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(JetfireError, match="predicts NaN or Inf"):
        sample.generate(model, _ids(1, 3), 2)
