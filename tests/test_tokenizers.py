"""Tokenizers against transformers' own, and what damaged vocabularies get."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetfire.gpt2 import tokenizers
from jetfire.ops.errors import UsageError

TEXT = "The thing, then: in an inn\n\n  on the re-re… café's 1234 \t<|endoftext|> 𝔘n\r\n "


def test_gpt2_encodes_as_transformers_does(gpt2_files):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    theirs = transformers.GPT2Tokenizer(
        vocab_file=str(gpt2_files / "encoder.json"), merges_file=str(gpt2_files / "vocab.bpe"),
        vocab=str(gpt2_files / "encoder.json"), merges=str(gpt2_files / "vocab.bpe"),
    )  # fmt: skip
    ours = tokenizers.gpt2(gpt2_files)
    for text in (TEXT.replace("<|endoftext|>", ""), " the\n\n\nthing  ", "in" * 50, "\n", "é"):
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]


def test_gpt2_separates_by_its_last_id_and_keeps_the_text_of_it_text(gpt2_files):
    tokenizer = tokenizers.gpt2(gpt2_files)
    assert (tokenizer.vocabulary, tokenizer.separator) == (268, 267)
    ids = tokenizer.encode(TEXT)
    assert 267 not in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([267]) == "<|endoftext|>"


def test_gpt2_encodes_long_runs(gpt2_files):
    tokenizer = tokenizers.gpt2(gpt2_files)
    for text in ("x" + " " * 999_999 + "y", "\n" * 300_000, "in" * 300_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_bytes_and_characters_decode_what_they_encode(text):
    byte, char = tokenizers.Bytes(), tokenizers.Characters(text)
    assert byte.decode(byte.encode(text)) == text
    assert char.decode(char.encode(text)) == text
    assert char.vocabulary == len(set(text))
    assert not len(text) or char.encode(text).max() < char.vocabulary


def test_an_unknown_character_is_named():
    for unknown in ("é", "A", "~", "\0"):
        with pytest.raises(UsageError, match="not in the vocabulary") as error:
            tokenizers.Characters("abc").encode(f"ab{unknown}")
        assert repr(unknown) in str(error.value)


def test_what_is_saved_loads(gpt2_files, tmp_path):
    for one in (tokenizers.Bytes(), tokenizers.Characters(TEXT), tokenizers.gpt2(gpt2_files)):
        description = json.loads(json.dumps(one.save(tmp_path)))
        again = tokenizers.load(description, tmp_path)
        assert (again.name, again.vocabulary, again.separator) == (
            one.name, one.vocabulary, one.separator,
        )  # fmt: skip
        np.testing.assert_array_equal(again.encode(TEXT), one.encode(TEXT))


def _damage(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("encoder.json", lambda text: text[:100], "encoder.json or vocab.bpe"),
        ("encoder.json", lambda text: "[]", "do not belong together"),
        ("encoder.json", lambda text: text.replace('"he"', '"hx"'), "do not belong together"),
        ("vocab.bpe", lambda text: text.replace("i n\n", ""), "expected encoder.json to number"),
        ("vocab.bpe", lambda text: text.replace("i n\nr e", "r e\ni n"), "in their order"),
        ("vocab.bpe", lambda text: text.replace("i n", "in"), "do not belong together"),
    ],
)
def test_damaged_vocabularies_are_refused(gpt2_files, tmp_path, name, change, says):
    folder = shutil.copytree(gpt2_files, tmp_path / "vocabulary")
    _damage(folder, name, change)
    with pytest.raises(UsageError, match=says):
        tokenizers.gpt2(folder)


def test_missing_vocabularies_are_named(gpt2_files, tmp_path):
    with pytest.raises(UsageError, match=r"encoder\.json"):
        tokenizers.gpt2(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot load its tokenizer"):
        tokenizers.load({"name": "gpt2", "ranks": "gpt2.tiktoken", "end": 1}, tmp_path)
    with pytest.raises(UsageError, match="expected one of byte, char, gpt2"):
        tokenizers.load({"name": "words"}, tmp_path)


def test_no_download_says_what_to_give(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name: str) -> None:
        raise ConnectionError(f"no route to {name}")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UsageError, match="--vocabulary FOLDER"):
        tokenizers.gpt2()
