"""Preparing text and reading the tokens: splits, bytes, streams, damage."""

import bz2
import gzip
import hashlib
import io
import itertools
import json
import lzma
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from jetfire.core.errors import UsageError
from jetfire.gpt2.data import corpora, prepare, prepared
from jetfire.gpt2.data import tokens as data


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))


def _texts(paths) -> list[str]:
    """The documents of files and folders, put together."""
    documents, parts = [], []
    for path in paths:
        for piece in corpora.find(str(path), None, Path(), print).pieces():
            parts.append(piece.text)
            if piece.last:
                documents.append("".join(parts))
                parts = []
    assert not parts
    return documents


def _folder(root: Path, count: int = 60) -> Path:
    """Files of 100 to 700 bytes, each of its own letter and number."""
    root.mkdir()
    for i in range(count):
        (root / f"{i:03}.txt").write_text(f"{chr(97 + i % 26)}{i:03}\n" * (20 + i * 7 % 120))
    return root


# --- reading text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".bz2"])
def test_files_are_read_packed_or_not(tmp_path, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[suffix]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack("naïve\r\ntext \xff".encode() + b"\xff"))
    assert _texts([path]) == ["naïve\r\ntext \xff�"]
    assert _texts([tmp_path]) == _texts([path])


def test_rows_are_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n\n{"text": "t\\ud800wo", "id": 3}\n')
    assert _texts([path]) == ["one", "t�wo"]
    for bad in ('{"body": "x"}', "3", "{", '{"text": null}', "[" * 100_000):
        path.write_text(f'"one"\n{bad}\n')
        with pytest.raises(UsageError, match=r"a\.jsonl:2: expected a JSON string"):
            _texts([path])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.html.gz"])
def test_what_is_whole_in_memory_is_not_endless(tmp_path, name, monkeypatch):
    monkeypatch.setattr(corpora, "WHOLE", 1000)
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'"' + bytes(100_000)))
    with pytest.raises(UsageError, match=rf"{name}.*: a document of more than 1000 bytes"):
        _texts([path])


def test_parquet_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="optional, for Parquet only")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]}), path)
    assert _texts([tmp_path]) == ["one", "two"]
    parquet.write_table(pyarrow.table({"id": [1]}), path)
    with pytest.raises(UsageError, match="expected a column `text`"):
        _texts([path])


def test_pages_are_stripped(tmp_path):
    page = (
        "<html><head><title>no</title><script>if (a<b) no()</script></head><body>"
        "<h1>Big  <em>news</em></h1><style>no</style><p>a &lt;\n b &amp; c</p>"
        "<pre>  x\n    y</pre><table><tr><td>1<td>2</table><svg><svg></svg>no</svg>end"
    )
    path = tmp_path / "a.html"
    path.write_text(page)
    assert _texts([path]) == ["Big news\n\na < b & c\n\n  x\n    y\n\n1\t2\nend\n"]


def test_archives_in_archives_are_read_as_openwebtext_has_them(tmp_path):
    def tar(members: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return out.getvalue()

    inner = lzma.compress(tar({"1.txt": b"one", "2.txt": b"two", "x.png": b"\0"}))
    (tmp_path / "subset00.tar").write_bytes(tar({"openwebtext/00-1_data.xz": inner, "b.md": b"b"}))
    assert _texts([tmp_path]) == ["one", "two", "b"]
    assert len(corpora.find("openwebtext", tmp_path, Path(), print).files) == 1
    (tmp_path / "subset00.tar").write_bytes(tar({"a.txt": b"x" * 9000})[:4000])
    with pytest.raises(UsageError, match=r"subset00\.tar: damaged"):
        _texts([tmp_path])


def test_what_is_hidden_is_not_read(tmp_path):
    for name in ("a.txt", ".b.txt", ".git/c.txt", "sub/.d/e.txt", "sub/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _texts([tmp_path]) == ["a.txt", "sub/f.txt"]


def test_a_long_document_comes_in_pieces_that_tokenize_as_the_whole(
    tmp_path, gpt2_files, monkeypatch
):
    monkeypatch.setattr(corpora, "PIECE", 256)
    from jetfire.gpt2.data.tokenizers import gpt2

    text = "".join(f"the thing é{i}\n" + "\n" * (i % 3) + " " * (i % 2) for i in range(200))
    path = tmp_path / "long.txt"
    path.write_text(text)
    pieces = [p.text for p in corpora.find(str(path), None, Path(), print).pieces()]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 256
    ids = np.concatenate([gpt2(gpt2_files).encode(piece) for piece in pieces])
    np.testing.assert_array_equal(ids, gpt2(gpt2_files).encode(text))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.gz", b"\x1f\x8b\x08\x00", "damaged|cannot read"),
        ("a.xz", lzma.compress(b"x" * 999)[:40], "damaged"),
        ("a.bin", b"a\0b", "NUL bytes"),
        ("a.parquet", b"PAR1", "pyarrow|damaged"),
        ("none", None, "no such file, folder or corpus: expected one of python"),
        ("empty", "folder", "no text in this folder"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, says):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
        (path / "image.png").write_bytes(b"\x89PNG")
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        prepare.prepare(path, "byte", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- named corpora --------------------------------------------------------------------------------


def test_python_is_its_standard_library(tmp_path):
    corpus = corpora.find("python", None, tmp_path, print)
    names = [name for name, _ in corpus.files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert prepare.default_folder(["python"], "byte").parent == tmp_path / "cache" / "data"


def test_shakespeare_is_read_from_a_copy_and_split_as_usual(tmp_path):
    copy = tmp_path / "works.txt"
    copy.write_text("To be, or not to be.\n" * 100)
    tokens = data.open_tokens(data.prepare("shakespeare-char", copy=copy))
    total = 2100
    assert len(tokens.train) == int(0.9 * total)
    assert tokens.folder == tmp_path / "cache" / "data" / "shakespeare-char-char"
    assert tokens.vocabulary == len(set("To be, or not to be.\n"))
    both = np.concatenate([tokens.train, tokens.validation])
    assert tokens.tokenizer.decode(both) == copy.read_text()


def test_downloads_are_checked_and_kept(tmp_path, monkeypatch):
    source, said = tmp_path / "input.txt", []
    source.write_text("To be\n" * 50)
    monkeypatch.setattr(corpora, "SHAKESPEARE", source.as_uri())
    with pytest.raises(UsageError, match=r"has SHA-256 .*, expected 86c4"):
        corpora.find("shakespeare", None, tmp_path / "c", said.append)
    assert not (tmp_path / "c").exists()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", digest)
    first = corpora.find("shakespeare", None, tmp_path / "c", said.append)
    source.unlink()
    assert corpora.find("shakespeare", None, tmp_path / "c", said.append) == first
    assert len(said) == 2
    with pytest.raises(UsageError, match=r"cannot download .*: jetfire-train prepare NAME --from"):
        corpora.find("shakespeare", None, tmp_path / "d", said.append)


class _Hub(SimpleHTTPRequestHandler):
    """Answers as the hub does: a digest is that of the file, or another."""

    wrong = ""

    def log_message(self, *_: object) -> None:
        pass

    def end_headers(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_header("X-Repo-Commit", corpora.REVISION)
        self.send_header("ETag", f'"{self.wrong or hashlib.sha256(content).hexdigest()}"')
        super().end_headers()


FROM_HUB = """
import sys
from pathlib import Path
from jetfire.core.errors import UsageError
from jetfire.gpt2.data import corpora
corpora.OPENWEBTEXT = corpora.OPENWEBTEXT[:2]
try:
    corpus = corpora.find("openwebtext", None, Path(), print)
    print(*(name for name, _ in corpus.files), *(piece.text for piece in corpus.pieces()))
except UsageError as error:
    print(error)
"""


ONLINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}  # whatever other tests have set


def from_hub(home, endpoint):
    """What a process says of openwebtext, of whose archives there are two."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_HUB],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **ONLINE},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_openwebtext_is_of_one_revision_and_kept_in_the_hub_s_own_cache(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / f"hub/datasets/{corpora.DATA_SET}/resolve/{corpora.REVISION}"
    (folder / "subsets").mkdir(parents=True)
    names = corpora.OPENWEBTEXT[:2]
    for text, name in zip(("one", "two"), names, strict=True):
        (tmp_path / "1.txt").write_text(text)
        with tarfile.open(folder / name, "w") as archive:
            archive.add(tmp_path / "1.txt", "1.txt")
    says = [f"downloading {corpora.DATA_SET}/{name}" for name in names]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, directory=str(tmp_path / "hub")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        found = from_hub(tmp_path / "home", endpoint)
        assert found == [*says, f"{names[0]} {names[1]} one two"]
        monkeypatch.setattr(_Hub, "wrong", "0" * 64)
        for _ in range(2):  # what was refused is not kept
            first, why = from_hub(tmp_path / "other", endpoint)
            assert first == says[0]
            assert re.search(r"subset00.tar has SHA-256 \w{64}, expected 0{64}: not used", why)
    finally:
        server.shutdown()
        server.server_close()
    assert from_hub(tmp_path / "home", endpoint) == found[2:]
    assert re.search(
        r"cannot download .*: jetfire-train prepare NAME --from PATH",
        from_hub(tmp_path / "other", endpoint)[-1],
    )


def test_without_the_hub_s_library_a_line_says_what_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        UsageError, match=r"needs huggingface_hub, .*: pip install 'jetfire\[text\]'$"
    ):
        corpora.find("openwebtext", None, tmp_path, print)


# --- preparing ------------------------------------------------------------------------------------


def test_documents_are_split_whole_and_whatever_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "MINIMUM", 500)
    source = _folder(tmp_path / "texts")
    found = {}
    for out in ("one", "renamed"):
        tokens = data.open_tokens(data.prepare(source, "byte", tmp_path / out))
        held = tokens.tokenizer.decode(tokens.validation)
        kept = tokens.tokenizer.decode(tokens.train)
        documents = {path.read_text() for path in source.iterdir()}
        chosen = {text for text in documents if text in held}
        assert sum(map(len, chosen)) == len(held)
        assert all(text in kept for text in documents - chosen)
        assert len(held) + len(kept) == sum(map(len, documents))
        assert 500 <= len(held) <= prepare.MOST * (len(held) + len(kept)) + 1
        found[out] = chosen
        for i, path in enumerate(sorted(source.iterdir())):
            path.rename(path.with_name(f"{(i * 7) % 60:03}-{i}.txt"))
    assert found["one"] == found["renamed"]
    assert tokens.meta["split"] == "documents"
    assert tokens.meta["documents"] == 60


def test_no_more_than_a_twentieth_is_held_out(tmp_path):
    """Of 20 to 40 kB half a percent, and MINIMUM too, would leave little or nothing to train on."""
    tokens = data.open_tokens(data.prepare(_folder(tmp_path / "texts"), "byte", tmp_path / "out"))
    total = len(tokens.train) + len(tokens.validation)
    assert total < prepare.MINIMUM
    assert tokens.meta["split"] == "documents"
    assert 0.025 * total <= len(tokens.validation) <= 0.05 * total


@pytest.mark.parametrize("large", [0, 7, 19])
def test_a_document_that_is_larger_than_that_is_trained_on(tmp_path, large):
    root = tmp_path / "texts"
    root.mkdir()
    for i in range(20):
        (root / f"{i:02}.txt").write_text(f"{i:03}\n" * (5000 if i == large else 25))
    tokens = data.open_tokens(data.prepare(root, "byte", tmp_path / "out"))
    assert tokens.meta["split"] == "documents"
    assert len(tokens.validation) <= 0.05 * (len(tokens.train) + len(tokens.validation))


def test_the_same_text_gives_the_same_bytes(tmp_path, gpt2_files, monkeypatch):
    monkeypatch.setattr(prepare, "MINIMUM", 500)
    source = _folder(tmp_path / "texts")
    folders = [
        prepare.prepare(source, "gpt2", tmp_path / name, vocabulary=gpt2_files) for name in "ab"
    ]
    for name in ("train.bin", "validation.bin", "meta.json", "gpt2.tiktoken"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert sorted(os.listdir(folders[0])) == [
        "gpt2.tiktoken",
        "meta.json",
        "train.bin",
        "validation.bin",
    ]
    tokens = data.open_tokens(folders[0])
    assert (tokens.train == 267).sum() + (tokens.validation == 267).sum() == 60
    assert tokens.train[-1] == tokens.validation[-1] == 267


def test_few_documents_give_their_tail(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 30)
    tokens = data.open_tokens(data.prepare(path, "byte", tmp_path / "out"))
    assert (len(tokens.train), len(tokens.validation)) == (270, 30)
    assert tokens.meta["split"] == "tail"


def test_wide_vocabularies_take_32_bits(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(map(chr, (*range(0x100, 0xD800), *range(0xE000, 0x11000)))))
    tokens = data.open_tokens(data.prepare(path, "char", tmp_path / "out"))
    assert tokens.vocabulary > 1 << 16
    assert tokens.train.dtype == np.uint32
    assert tokens.tokenizer.decode(tokens.validation) == path.read_text()[-len(tokens.validation) :]


def test_prepared_text_is_not_prepared_again_until_it_changes(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one\n" * 100)
    prepare.prepare(path, "byte", out)
    before = (out / "train.bin").stat().st_ino
    assert prepare.prepare(path, "byte", out) == out
    assert (out / "train.bin").stat().st_ino == before
    mapped = data.open_tokens(out)
    path.write_text("two\n" * 100)
    prepare.prepare(path, "byte", out)
    assert bytes(data.open_tokens(out).train[:3].tolist()) == b"two"
    assert bytes(mapped.train[:3].tolist()) == b"one"  # who has it open keeps it
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "out"}
    # A process that was killed leaves its folder and its lock behind.
    (tmp_path / ".out.x1y2.part").mkdir()
    (tmp_path / ".out.lock").touch()
    path.write_text("one\n" * 100)
    prepare.prepare(path, "byte", out)
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "out"}


def test_tokens_that_are_there_are_used_where_nothing_can_be_written(folder, monkeypatch):
    """Tests may run as root, who may write everywhere: so what locks a file is replaced."""

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(prepare.files, "_lock", refused)
    path = folder.parent / "a.txt"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert prepare.prepare(path, "byte", folder) == folder
    path.write_text("other\n" * 100)
    for place in (folder, folder.parent / "new"):
        with pytest.raises(UsageError, match=r"\.lock: cannot be written: Permission denied"):
            prepare.prepare(path, "byte", place)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda at: os.truncate(at / "train.bin", 7),
        lambda at: _spoil(at, b"x"),
        lambda at: (at / "meta.json").write_text("{"),
        lambda at: _edit(at, vocabulary=255),
    ],
)
def test_what_is_damaged_is_prepared_again(folder, damage):
    path = folder.parent / "a.txt"
    before = (folder / "train.bin").read_bytes()
    damage(folder)
    prepare.prepare(path, "byte", folder)
    assert (folder / "train.bin").read_bytes() == before
    data.open_tokens(folder)


def test_what_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one\n" * 100)
    prepare.prepare(path, "byte", out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path.write_text("two\n" * 100)
    monkeypatch.setattr(prepare, "_copy", full)
    for place in (out, tmp_path / "new"):
        with pytest.raises(UsageError, match=rf"{place}: cannot be written: No space left"):
            prepare.prepare(path, "byte", place)
    assert bytes(data.open_tokens(out).train[:3].tolist()) == b"one"
    assert {p.name for p in tmp_path.iterdir()} == {"a.txt", "out"}


def _prepare_too(path: str, out: str) -> None:
    prepare.prepare(path, "byte", Path(out))


def test_processes_take_turns(tmp_path):
    source = _folder(tmp_path / "texts")
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=_prepare_too, args=(str(source), str(tmp_path / "out")))
        for _ in range(3)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    data.open_tokens(tmp_path / "out")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"names": []}, "expected a corpus"),
        ({"tokenizer": "word"}, "no tokenizer 'word': expected byte or char or gpt2"),
        ({"vocabulary": Path("v")}, "expected with the gpt2 tokenizer, not byte"),
        ({"copy": Path("c")}, "--from c: expected only with shakespeare"),
        ({"names": "python", "copy": Path("c")}, "nothing to copy"),
        ({"names": "shakespeare", "copy": Path("nowhere")}, "--from nowhere: expected a text file"),
        ({"names": "openwebtext", "copy": Path("nowhere")}, "--from nowhere: no such file"),
        ({"names": ["shakespeare", "a.txt"], "copy": Path("c")}, "expected with one corpus"),
    ],
)
def test_what_cannot_be_prepared_says_so(tmp_path, asked, says):
    path = tmp_path / "a.txt"
    path.write_text("one\n" * 100)
    given = {"names": path, "tokenizer": "byte", "output": tmp_path / "out"} | asked
    with pytest.raises(UsageError, match=says):
        prepare.prepare(**given)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text("one\n" * 100)
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        prepare.prepare(path, "byte", out)
    assert (out / "thesis.tex").read_text() == "mine"
    (out / "meta.json").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        prepare.prepare(path, "byte", out)
    (out / "thesis.tex").unlink()
    with pytest.raises(UsageError, match="holds something else"):
        prepare.prepare(path, "byte", out)
    assert (out / "meta.json").read_text() == "mine"
    path.write_text("")
    with pytest.raises(UsageError, match="there is no text in it"):
        prepare.prepare(path, "byte", tmp_path / "new")


def test_what_is_put_into_a_folder_meanwhile_is_left_alone(folder, monkeypatch):
    write = prepare._write

    def meanwhile(*given):
        (folder / "thesis.tex").write_text("mine")
        return write(*given)

    monkeypatch.setattr(prepare, "_write", meanwhile)
    with pytest.raises(UsageError, match="holds something else"):
        prepare.prepare(folder.parent / "a.txt", "char", folder)
    assert (folder / "thesis.tex").read_text() == "mine"
    data.open_tokens(folder)


def test_the_command_says_where_and_how_many(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text("one\n" * 100)
    prepare.run([str(path)], "byte", None, None, tmp_path / "out")
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'out'}\n"
    assert "360 training and 40 validation tokens (byte, vocabulary 256)" in said.err


# --- reading tokens -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(300)))
    return prepare.prepare(path, "byte", tmp_path / "out")


def test_a_batch_is_a_function_of_its_arguments(folder):
    tokens = data.open_tokens(folder).train
    ids, targets = data.batch(tokens, 16, 8, seed=1, step=2, micro=3, rank=4)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.shape == targets.shape == (8, 16)
    torch.testing.assert_close(ids[:, 1:], targets[:, :-1])
    again = data.batch(tokens, 16, 8, seed=1, step=2, micro=3, rank=4)
    assert torch.equal(ids, again[0])
    at = dict.fromkeys(("seed", "step", "micro", "rank"), 1)
    batches = [data.batch(tokens, 16, 8, **at)[0]]
    batches += [data.batch(tokens, 16, 8, **at | {name: 2})[0] for name in at]
    batches.append(data.batch(tokens, 16, 8, **at | {"seed": -1})[0])
    assert len({batch.numpy().tobytes() for batch in batches}) == 6


def test_batches_are_the_same_on_every_machine():
    """Philox4x64 is published (Salmon et al., 2011): these starts must never change."""
    tokens = np.arange(10_000, dtype=np.uint16)
    ids, _ = data.batch(tokens, 4, 5, seed=7, step=11, micro=1, rank=2)
    assert ids[:, 0].tolist() == [5987, 4316, 768, 1117, 8274]


def test_batches_reach_every_window():
    tokens = np.arange(12, dtype=np.uint16)
    seen = set()
    for step in range(50):
        ids, targets = data.batch(tokens, 4, 8, seed=0, step=step)
        seen |= set(ids[:, 0].tolist())
        assert targets.max() <= 11
    assert seen == set(range(8))


def test_shuffled_batches_read_every_token_once_an_epoch():
    tokens = np.arange(1 + 10 * 6 + 3, dtype=np.uint16)  # ten windows, and a rest too short for one
    rows = [data.shuffled(tokens, 6, 4, seed=3, first=first) for first in range(0, 40, 4)]
    starts = torch.cat([ids[:, 0] for ids, _ in rows]).tolist()
    targets = torch.cat([targets for _, targets in rows])
    epochs = [starts[i : i + 10] for i in range(0, 40, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 60, 6))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sorted(targets[:10].flatten().tolist()) == list(range(1, 61))
    assert all(torch.equal(ids[:, 1:], targets[:, :-1]) for ids, targets in rows)
    # Philox4x64 is published, as the order of drawn windows is: this one must never change.
    assert starts[:10] == [18, 36, 24, 30, 48, 6, 12, 54, 42, 0]
    other, _ = data.shuffled(tokens, 6, 10, seed=4, first=0)
    assert other[:, 0].tolist() != starts[:10]


def test_evaluation_spreads_over_the_split():
    tokens = np.arange(1000, dtype=np.uint16)
    windows = list(data.evaluation(tokens, 9, 4, 5))
    starts = torch.cat([ids[:, 0] for ids, _ in windows]).tolist()
    assert (len(windows), len(starts), starts[0], starts[-1]) == (5, 20, 0, 990)
    assert {b - a for a, b in itertools.pairwise(starts)} <= {52, 53}
    assert windows[-1][1][-1].tolist() == list(range(991, 1000))
    assert [ids.shape for ids, _ in data.evaluation(tokens[:10], 9, 4, 2)] == [(4, 9)] * 2


def test_too_few_tokens_are_told(folder):
    tokens = data.open_tokens(folder)
    few = tokens.train[:16]
    with pytest.raises(UsageError, match="16 tokens: expected more than context=16"):
        data.batch(few, 16, 1, seed=0, step=0)
    with pytest.raises(UsageError, match="16 tokens: expected more than context=16"):
        data.shuffled(few, 16, 1, seed=0, first=0)
    with pytest.raises(UsageError, match="16 tokens: expected more than context=16"):
        next(data.evaluation(few, 16, 1, 1))
    tokens.require(16, 256)
    with pytest.raises(UsageError, match="validation tokens: expected more than context=2000"):
        tokens.require(2000)
    with pytest.raises(UsageError, match="vocabulary 256: expected at most the model's, 200"):
        tokens.require(16, 200)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda at: os.truncate(at / "train.bin", 11), r"train\.bin: is damaged: 11 bytes"),
        (lambda at: (at / "validation.bin").unlink(), r"validation\.bin: No such file"),
        (lambda at: (at / "meta.json").unlink(), r"meta\.json: No such file.*: expected a folder"),
        (lambda at: (at / "meta.json").write_text("{"), r"meta\.json: no JSON"),
        (lambda at: (at / "meta.json").write_text("[]"), r"meta\.json: .*expected a JSON object"),
        (lambda at: _spoil(at, b"\0"), r"train\.bin: is damaged: its SHA-256 is not meta\.json's"),
        (lambda at: _forge(at, b"\xff\xff"), "token 65535, expected below 256"),
        (lambda at: _edit(at, format=2), "format 2, expected 1: prepare it again"),
        (lambda at: _edit(at, dtype="complex"), "dtype='complex': expected 'uint16' or 'uint32'"),
        (lambda at: _edit(at, dtype="O"), "dtype='O': expected"),
        (lambda at: _edit(at, dtype="f8"), "dtype='f8': expected"),
        (lambda at: _edit(at, vocabulary=10**9), "vocabulary=1000000000: expected"),
        (lambda at: _edit(at, vocabulary=257), "vocabulary=257: expected the tokenizer's, 256"),
        (lambda at: _edit(at, train=-1), "train=-1: expected"),
        (lambda at: _edit(at, tokenizer={"name": "gpt2", "ranks": "../x", "end": 256}), "ranks="),
    ],
)
def test_damaged_folders_are_refused(folder, damage, says):
    damage(folder)
    with pytest.raises(UsageError, match=says):
        data.open_tokens(folder)


def _spoil(folder: Path, ids: bytes) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.seek(100)
        file.write(ids)


def _forge(folder: Path, ids: bytes) -> None:
    """Tokens that nobody's vocabulary has, under the digest that they have."""
    _spoil(folder, ids)
    meta = json.loads((folder / "meta.json").read_text())
    digest = hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest()
    _edit(folder, sha256=meta["sha256"] | {"train": digest})


def _edit(folder: Path, **fields: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | fields))


def test_large_files_are_read_through_again_once_they_were_written_to(folder, monkeypatch):
    said = []
    monkeypatch.setattr(prepared, "REMEMBERED", 0)
    for _ in range(2):
        data.open_tokens(folder, said.append)
    assert [line.split(" in ")[1] for line in said] == [
        f"{folder / name}.bin" for name in ("train", "validation")
    ]
    stat = (folder / "train.bin").stat()
    _spoil(folder, b"\0")
    os.utime(folder / "train.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UsageError, match="its SHA-256 is not"):
        data.open_tokens(folder)
    (prepared.cache() / prepared.CHECKED).write_text("no record")
    with pytest.raises(UsageError, match="its SHA-256 is not"):
        data.open_tokens(folder)


def test_tokens_that_are_written_to_meanwhile_are_noticed(folder):
    tokens = data.open_tokens(folder)
    prepare.prepare(folder.parent / "a.txt", "char", folder)  # takes the name alone
    tokens.check_untouched()
    tokens = data.open_tokens(folder)
    _spoil(folder, b"\0")
    with pytest.raises(UsageError, match=r"train\.bin: was written to while it was trained on"):
        tokens.check_untouched()


def test_what_is_said_is_shown_cleaned(tmp_path, monkeypatch, capsys):
    def find(name, copy, cache, say):
        say(f"reading {name}")
        raise UsageError("nothing there")

    monkeypatch.setattr(corpora, "find", find)
    with pytest.raises(UsageError, match="nothing there"):
        prepare.run(["a\x1b[2J\nb"], None, None, None, tmp_path / "out")
    assert capsys.readouterr().err == "jetfire: reading a\\x1b[2J b\n"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        data.open_tokens(tmp_path / "nowhere")


@pytest.mark.gpu
def test_batches_reach_the_gpu_as_they_are(folder, device):
    tokens = data.open_tokens(folder).train
    for step in range(20):
        here = data.batch(tokens, 32, 8, seed=0, step=step)
        there = data.batch(tokens, 32, 8, seed=0, step=step, device=device)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
