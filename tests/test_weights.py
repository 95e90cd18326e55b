"""GPT-2's and Llama's weights from and to transformers' folders, and sampling."""

import dataclasses
import json
import resource
import zipfile

import numpy as np
import pytest
import torch

from jetfire.core.errors import JetfireError, UsageError
from jetfire.gpt2.data import tokenizers
from jetfire.gpt2.model import sample, weights
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.model.gpt2 import GPT2
from jetfire.gpt2.model.shape import LlamaShape, Shape

SHAPE = Shape(layers=2, heads=2, width=32, context=24, vocabulary=70)
LLAMA = LlamaShape(2, 4, 32, 24, 70, kv_heads=2, hidden=48, tied=False)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="the oracle is not installed")


@pytest.fixture
def theirs(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=24,
        vocab_size=70,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
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
    assert weights.save_transformers(tmp_path, SHAPE, model.state_dict()) == tmp_path
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(_ids()), theirs(_ids()).logits, rtol=1e-4, atol=1e-4)
    again, state = weights.read_transformers(tmp_path)
    assert again == SHAPE
    for name, value in state.items():
        valid = 70 if name == "tokens.weight" else len(value)
        assert torch.equal(value[:valid], model.state_dict()[name][:valid])
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_shorter_context_takes_the_first_positions(tmp_path):
    model = GPT2(SHAPE)
    weights.save_transformers(tmp_path, SHAPE, model.state_dict())
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
        ({"model_type": "bert"}, "model_type 'bert': expected 'gpt2' or 'llama'"),
        ({"activation_function": "relu"}, "expected 'gelu_new' or 'gelu_pytorch_tanh'"),
        ({"n_inner": 100}, "n_inner 100: expected 128"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False: expected True"),
        ({"n_layer": None}, "n_layer=None: expected an integer"),
        ({"n_layer": 3}, r"no weight h\.2\."),
        ({"n_layer": 1}, r"weight 'h\.1\..* has no place"),
        ({"n_embd": 16}, "wte.weight is F32 70×32: expected floats 70×16 as config.json says"),
        ({"n_embd": 33}, "n_embd 33: expected a multiple of n_head"),
        ({"n_layer": 10**9}, "n_layer=1000000000: expected less than or equal to 1024"),
        ({"vocab_size": 10**9}, "vocab_size=1000000000: expected less"),
        ({"resid_pdrop": "0.1"}, "resid_pdrop='0.1': expected a number"),
        ({"model_type": ["gpt2"]}, r"model_type=\['gpt2'\]: expected a finite number, text"),
    ],
)
def test_what_is_not_our_gpt2_is_refused(tmp_path, config, says):
    weights.save_transformers(tmp_path, SHAPE, GPT2(SHAPE).state_dict())
    held = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(held | config))
    with pytest.raises(UsageError, match=says):
        weights.read_transformers(tmp_path)


def _of_llama(transformers, **changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=24,
        vocab_size=70,
        rms_norm_eps=1e-5,
        **changes,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin"])
def test_llama_s_logits_are_those_of_transformers(transformers, tmp_path, layout, tied):
    theirs = _of_llama(transformers, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB" if layout == "sharded" else "5GB")
    if layout == "bin":
        (tmp_path / "model.safetensors").unlink()
        inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # once kept too
        torch.save({**theirs.state_dict(), **inverse}, tmp_path / "pytorch_model.bin")
    ours = model_of(dataclasses.replace(LLAMA, tied=tied)).eval()
    weights.load(ours, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(_ids()), theirs(_ids()).logits, rtol=1e-4, atol=1e-4)
    assert ours.output.shape == (128, 32)
    assert not ours.output[70:].any()
    with pytest.raises(UsageError, match=f"tied={tied}, .*; the model expects .*tied={not tied}"):
        weights.load(model_of(dataclasses.replace(LLAMA, tied=not tied)), tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_llama_as_it_is_saved(transformers, tmp_path, tied):
    torch.manual_seed(2)
    shape = dataclasses.replace(LLAMA, tied=tied)
    model = model_of(shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights.save_transformers(tmp_path, shape, model.state_dict())
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(_ids()), theirs(_ids()).logits, rtol=1e-4, atol=1e-4)
    again, state = weights.read_transformers(tmp_path)
    assert again == shape
    for name, value in state.items():
        valid = 70 if name in ("tokens.weight", "head.weight") else len(value)
        assert torch.equal(value[:valid], model.state_dict()[name][:valid])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06: expected 1e-05"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0: expected 10000.0"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters {'rope_type': 'llama3'}"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling {'type': 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': expected 'silu'"),
        ({"attention_bias": True}, "attention_bias True: expected False"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3: expected a divisor of num_attention"),
        ({"num_key_value_heads": 4}, "k_proj.weight is F32 16×32: expected floats 32×32"),
        ({"head_dim": 16}, "head_dim 16: expected 8, hidden_size / num_attention_heads"),
        ({"hidden_size": 36}, "hidden_size 36: expected num_attention_heads times an even number"),
        ({"hidden_size": 1 << 20}, "hidden_size=1048576: expected less than or equal to 65536"),
        ({"intermediate_size": None}, "intermediate_size=None: expected an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': expected true or false"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not embed_tokens.weight"),
        ({"model_type": "gpt2"}, "n_layer is missing"),
    ],
)
def test_what_is_not_our_llama_is_refused(tmp_path, config, says):
    weights.save_transformers(tmp_path, LLAMA, model_of(LLAMA).state_dict())
    held = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(held | config))
    with pytest.raises(UsageError, match=says):
        weights.read_transformers(tmp_path)


def test_of_llama_s_config_what_is_usual_may_be_absent(tmp_path):
    shape = dataclasses.replace(LLAMA, kv_heads=4)
    weights.save_transformers(tmp_path, shape, model_of(shape).state_dict())
    held = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_key_value_heads", "tie_word_embeddings", "rope_theta", "rope_parameters"):
        del held[name]
    (tmp_path / "config.json").write_text(json.dumps(held))
    assert weights.read_transformers(tmp_path)[0] == shape


@pytest.fixture
def saved(tmp_path):
    """A folder as transformers keeps a model."""
    folder = tmp_path / "saved"
    weights.save_transformers(folder, SHAPE, GPT2(SHAPE).state_dict())
    return folder


def test_damaged_and_missing_files_are_named(saved):
    whole = (saved / "model.safetensors").read_bytes()
    for content in (whole[:5000], whole[:4], b"", b"\xff" * 16):
        (saved / "model.safetensors").write_bytes(content)
        with pytest.raises(UsageError, match=r"model\.safetensors: (no whole|a header of)"):
            weights.read_transformers(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"expected .* model\.safetensors or pytorch_model\.bin"):
        weights.read_transformers(saved)
    for content in (b"", b"garbage", b"PK\x03\x04"):
        (saved / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UsageError, match="cannot read the weights"):
            weights.read_transformers(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: no JSON"):
        weights.read_transformers(saved)
    with pytest.raises(UsageError, match=r"config\.json: No such file"):
        weights.read_transformers(saved / "nowhere")


class Harm:
    def __reduce__(self):
        return (print, ("harm",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"wte.weight": Harm()}, "cannot read the weights"),
        ({"wte.weight": 3}, "expected names and tensors"),
        ({3: torch.zeros(1)}, "expected names and tensors"),
        ([torch.zeros(1)], "expected names and tensors"),
        ({"wte.weight": torch.zeros(70, 32)}, "no weight"),
        ({"wte.weight": torch.zeros(1).expand(10**9, 10**6)}, r"1000000000×1000000: expected"),
        ({"wte.weight": torch.zeros(70, 32).to_sparse()}, "sparse_coo 70×32: expected floats"),
        ({"wte.weight": torch.zeros(70, 32, dtype=torch.int64)}, "int64 70×32: expected floats"),
    ],
)
def test_a_pickle_that_is_no_state_dict_is_refused(saved, content, says, capsys):
    """None runs code, and none is taken for larger than the file."""
    (saved / "model.safetensors").unlink()
    torch.save(content, saved / "pytorch_model.bin")
    with pytest.raises(UsageError, match=says):
        weights.read_transformers(saved)
    assert capsys.readouterr().out == ""


def test_a_pickle_is_not_unpacked(saved):
    (saved / "model.safetensors").unlink()
    with zipfile.ZipFile(saved / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with pytest.raises(UsageError, match="expected them as torch saves them, unpacked"):
        weights.read_transformers(saved)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"wte.weight": "../saved/model.safetensors"}, "expected letters, digits"),
        ({"wte.weight": "/etc/passwd"}, "expected letters, digits"),
        ({"wte.weight": "none.safetensors"}, r"none\.safetensors: No such file"),
        ({"wte.weight": "config.json"}, r"config\.json: a header of"),
        ({"wte.weight": 3}, "expected text"),
        ([], "expected a JSON object"),
    ],
)
def test_an_index_names_files_of_its_folder(saved, index, says):
    text = json.dumps({"weight_map": index})
    (saved / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        weights.read_transformers(saved)


@pytest.mark.parametrize("before", [True, False])
def test_an_export_that_does_not_fit_the_disk_leaves_what_was_there(saved, before, tmp_path):
    place = tmp_path / "theirs"
    if before:
        place.mkdir()
        (place / "config.json").write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot be written: .*File too large"):
            weights.save_transformers(place, SHAPE, GPT2(SHAPE).state_dict())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {p.name for p in tmp_path.iterdir()} == {"saved", *(["theirs"] if before else [])}
    if before:
        assert {p.name: p.read_text() for p in place.iterdir()} == {"config.json": "before"}


def test_an_export_keeps_what_else_is_in_its_folder(saved):
    (saved / "README.md").write_text("mine")
    weights.save_transformers(saved, SHAPE, GPT2(SHAPE).state_dict())
    assert (saved / "README.md").read_text() == "mine"
    assert {p.name for p in saved.iterdir()} == {"README.md", "config.json", "model.safetensors"}


# --- sampling -------------------------------------------------------------------------------------


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(3)
    return GPT2(SHAPE)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_likeliest_tokens_are_those_of_transformers(family, theirs, transformers, tmp_path):
    if family == "llama":
        theirs = _of_llama(transformers, bos_token_id=None, eos_token_id=None)
    theirs.save_pretrained(tmp_path)
    ours = model_of(LLAMA if family == "llama" else SHAPE).eval()
    weights.load(ours, tmp_path)
    ids = _ids(2, 6)
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(sample.generate(ours, ids, 12, temperature=0), expected)


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
