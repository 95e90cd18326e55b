"""Five hundred mistakes on the command line: each is one line, with its documented exit code."""

import os
import shlex
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.measure import peaks
from jetfire.measure.runner import Runner

TABLE = Path(__file__).parent / "data" / "mistakes.txt"
SPECIAL = {"%LONG%": "x" * 100_000, "%ESC%": "\x1b[31m"}
VERBS = (
    "bench",
    "compare",
    "history",
    "new",
    "list",
    "tune",
    "fuzz",
    "export",
    "train",
    "advise",
    "audit",
    "report",
    "completion",
    "doctor",
)


def mistakes():
    """Code, words as they are written, and what is said of them."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            command, _, says = line.partition(" => ")
            code, _, words = command.partition(" ")
            # What is tuned on a CPU is Triton's, interpreted.
            if interpreting or not (words.startswith("tune") and "--device cpu" in words):
                yield int(code), words, says


def verb_of(words):
    first = words.split(" ")[0]
    return first if first in VERBS else "none"


@pytest.fixture
def here(tmp_path, monkeypatch, shipped):
    """A current folder with files that are not what is asked for."""
    for folder in ("dir", "emptydir", "run"):
        (tmp_path / folder).mkdir()
    texts = {
        "file": "x",
        "empty.json": "",
        "bad.json": "{",
        "list.json": "[]",
        "null.json": "null",
        "text.txt": "hello world " * 500,
        "empty.txt": "",
        "notpy.py": "x = 1\n",
        "run/settings.json": "{}",
        "dir/x": "",
        "bad.toml": "m = [",
        "load.toml": 'load = "notpy.py"',
        "code.toml": 'model = "os:getcwd"',
        "near.toml": "bloc = 32",
        "sizes.toml": 'm = "x"',
        "bools.toml": "resume = 1",
        "lists.toml": "steps = [1, 2]",
        "pairs.toml": 'set = "batch=2"',
        "quiet.toml": "quiet = true",
        "big.json": '{"schema": 1, "device": {"name": "x"}, "rows": [{"op": 1}]}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "nul.txt").write_bytes(b"\0" * 5000)
    (tmp_path / "bin.json").write_bytes(b"\xff\xfe\x00\x01" * 100)
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "JETFIRE_STUDIES"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("JETFIRE_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PEAKS = {"copy_gbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0, "how": {}}


@pytest.mark.parametrize("verb", [*VERBS, "none"])
def test_each_mistake_is_one_line_with_its_code(verb, here, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    monkeypatch.setattr(peaks, "measure", lambda *_: PEAKS)
    before = {path for path in here.rglob("*") if "home" not in path.parts}
    wrong, count = [], 0
    for code, words, says in mistakes():
        if verb_of(words) != verb:
            continue
        for name, text in SPECIAL.items():
            words = words.replace(name, text)
        found = execute(None, shlex.split(words))
        out, err = capsys.readouterr()
        count += 1
        right = (found, out, err.count("\n")) == (code, "", 1) and err.startswith("jetfire: ")
        if not right or says not in err or "\x1b" in err or "internal error" in err:
            wrong.append((words[:80], found, out[:80], err[:300]))
    assert wrong == []
    assert count
    left = {path for path in here.rglob("*") if "home" not in path.parts} - before
    assert not [path for path in left if not path.name.endswith(".lock")]


def test_there_are_mistakes_enough():
    assert len(list(mistakes())) > 400
