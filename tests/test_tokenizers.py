"""Tokenizers against transformers' own, and what damaged vocabularies get."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetfire.core.errors import UsageError
from jetfire.gpt2.data import corpora, prepare, tokenizers

TEXT = "The thing, then: in an inn\n\n  on the re-re… café's 1234 \t<|endoftext|> 𝔘n\r\n "


def test_gpt2_encodes_as_transformers_does(gpt2_files):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    theirs = transformers.GPT2Tokenizer(
        vocab_file=str(gpt2_files / "encoder.json"),
        merges_file=str(gpt2_files / "vocab.bpe"),
        vocab=str(gpt2_files / "encoder.json"),
        merges=str(gpt2_files / "vocab.bpe"),
    )
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
            one.name,
            one.vocabulary,
            one.separator,
        )
        np.testing.assert_array_equal(again.encode(TEXT), one.encode(TEXT))


def _damage(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("encoder.json", lambda text: text[:100]),
        ("encoder.json", lambda text: "[]"),
        ("encoder.json", lambda text: text.replace(": 3,", ': "3",', 1)),
        ("encoder.json", lambda text: text.replace(": 3,", ": 4,", 1)),
        ("encoder.json", lambda text: text.replace("end", "fin")),
        ("encoder.json", lambda text: text.replace('"he"', '"hx"')),
        ("vocab.bpe", lambda text: text.replace("i n\n", "")),
        ("vocab.bpe", lambda text: text.replace("i n\nr e", "r e\ni n")),
        ("vocab.bpe", lambda text: text.replace("i n", "in")),
    ],
)
def test_damaged_vocabularies_are_refused(gpt2_files, tmp_path, name, change):
    folder = shutil.copytree(gpt2_files, tmp_path / "vocabulary")
    before = tokenizers.gpt2(folder)  # of which tiktoken keeps a copy
    path = folder / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UsageError, match="which belong together"):
        tokenizers.gpt2(folder)
    assert before.vocabulary == 268


def test_missing_vocabularies_are_named(gpt2_files, tmp_path):
    with pytest.raises(UsageError, match=r"encoder\.json"):
        tokenizers.gpt2(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"gpt2\.tiktoken: No such file"):
        tokenizers.load({"name": "gpt2", "ranks": "gpt2.tiktoken", "end": 1}, tmp_path)
    with pytest.raises(UsageError, match=r"meta\.json: No such file"):
        tokenizers.kept(tmp_path)


@pytest.mark.parametrize(
    ("description", "says"),
    [
        ({"name": "words"}, "'words'"),
        ({"name": "char"}, "characters is missing"),
        ({"name": "char", "characters": ""}, "at least 1 character"),
        ({"name": "char", "characters": ["a"]}, "expected text"),
        ({"name": "gpt2", "ranks": "../../.bashrc", "end": 267}, r"'\.\./\.\./\.bashrc': expected"),
        ({"name": "gpt2", "ranks": "gpt2.tiktoken", "end": 10**9}, "end=1000000000: expected"),
        ([], "expected a JSON object"),
    ],
)
def test_a_description_is_one_of_three(tmp_path, description, says):
    (tmp_path / "meta.json").write_text(json.dumps(description))
    with pytest.raises(UsageError, match=says):
        tokenizers.kept(tmp_path)


@pytest.mark.parametrize(
    ("change", "end", "says"),
    [
        (lambda lines: lines, 268, "268 ends text"),
        (lambda lines: lines, 3, "3 ends text"),
        (lambda lines: lines[1:], 267, "266 tokens"),
        (lambda lines: [*lines, lines[0]], 267, "a token is there twice"),
        (lambda lines: [*lines[:-1], b"eHl6 3"], 267, "expected ids from 0"),
        (lambda lines: [*lines[:-1], b"eHl6 99999999999999999999"], 267, "expected ids from 0"),
        (lambda lines: [b"eHl6 0", *lines[1:]], 267, "each of the 256 bytes"),
        (lambda lines: [b"not base64 at all"], 1, "is no list of tokens"),
        (lambda lines: [b"\xff\xfe 0"], 1, "is no list of tokens"),
    ],
)
def test_ranks_that_would_end_the_process_are_refused(gpt2_files, tmp_path, change, end, says):
    """tiktoken panics at some of them, at once or when it meets the token."""
    tokenizers.gpt2(gpt2_files).save(tmp_path)
    file = tmp_path / tokenizers.RANKS
    file.write_bytes(b"\n".join(change(file.read_bytes().splitlines())))
    with pytest.raises(UsageError, match=says):
        tokenizers.load({"name": "gpt2", "ranks": "gpt2.tiktoken", "end": end}, tmp_path)


def test_ranks_are_those_that_were_written(gpt2_files, tmp_path):
    description = tokenizers.gpt2(gpt2_files).save(tmp_path)
    file = tmp_path / tokenizers.RANKS
    text = file.read_text()
    file.write_text(text.replace("aGU=", "aGY="))  # "he" and "hf"
    with pytest.raises(UsageError, match="is not what was written"):
        tokenizers.load(description, tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="is not what was written"):  # not after days of training
        tokenizers.keep(description, tmp_path, tmp_path / "run")
    assert not any((tmp_path / "run").iterdir())
    del description["sha256"]  # as earlier versions had it
    tokenizers.load(description, tmp_path)


def test_a_tokenizer_is_kept_under_its_own_name_alone(gpt2_files, tmp_path):
    description = tokenizers.gpt2(gpt2_files).save(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "other").write_text("mine")
    (kept / tokenizers.RANKS).symlink_to(tmp_path / "other")
    tokenizers.keep(description, tmp_path, kept)
    assert (tmp_path / "other").read_text() == "mine"
    assert tokenizers.kept(kept).encode(TEXT).tolist() == (
        tokenizers.gpt2(gpt2_files).encode(TEXT).tolist()
    )


def test_no_download_says_what_to_give(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name: str) -> None:
        raise ConnectionError(f"no route to {name}")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UsageError, match="jetfire-train prepare with --vocabulary FOLDER"):
        tokenizers.gpt2()


def test_without_tiktoken_a_line_says_what_brings_it(gpt2_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UsageError, match=r"needs tiktoken, .*: pip install 'jetfire\[text\]'$"):
        tokenizers.gpt2(gpt2_files)


def test_nothing_is_downloaded_for_a_tokenizer_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(corpora, "find", lambda *given: pytest.fail("would download"))
    with pytest.raises(UsageError, match="needs tiktoken"):
        prepare.prepare("openwebtext", output=tmp_path / "out")
