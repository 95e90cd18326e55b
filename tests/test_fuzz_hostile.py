"""Cases from strangers: `--reproduce` tells them in a line, and runs no code that they list."""

import json
import math
import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.device import Device
from jetfire.fuzz import store
from jetfire.fuzz.example import Example, Failure
from jetfire.tests.hostile import ESC, MARKUP, damaged, few, mutated, replaced

CPU = Device.parse("cpu")
SECONDS, MEMORY_KIB = 5, 1 << 20


def good() -> dict:
    """A failure of a kernel of the tree, which has been mended since."""
    problem = registry.get("gemm").Problem(33, 20, 40, block=32)
    case = Example("gemm", "int_mm", problem.as_dict(), {}, layout={"x": (3, 1)}, offset=2)
    return json.loads(json.dumps(store.content(Failure(case, "was wrong", "wrong"), CPU)))


@pytest.fixture
def reproduce(tmp_path, monkeypatch, capsys):
    """What runs such a file: exit code and the lines on stderr; in time and memory, alone."""
    given = tmp_path / "given"
    given.mkdir()
    file = given / "it.json"
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "own"))

    def alarm(*_):
        raise AssertionError("took too long")

    def run(content: bytes) -> tuple[int, list[str]]:
        file.write_bytes(content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        previous = signal.signal(signal.SIGVTALRM, alarm)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            code = execute("fuzz", ["--reproduce", str(file), "--device", "cpu"])
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, previous)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB
        assert os.listdir(tmp_path) == ["given"]
        assert os.listdir(given) == ["it.json"]
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert all(line.isprintable() for line in (*out.splitlines(), *lines))
        assert "internal error" not in err
        return code, lines

    return run


def changed(*path, to) -> bytes:
    """The file with the value at a path replaced."""
    return json.dumps(replaced(good(), *path, to=to)).encode()


HOSTILE = {
    "empty": b"",
    "no text": b"\xff\xfe{}",
    "no end": json.dumps(good()).encode()[:-40],
    "a list": b"[]",
    "nested": b'{"schema":1,"case":' + b"[" * 100_000,
    "large": b" " * (store.MOST + 1),
    "version": changed("schema", to=2),
    "a case's version": changed("case", "version", to=2),
    "no case": changed("case", to={}),
    "kind": changed("kind", to="slow"),
    "escapes": changed("message", to=ESC),
    "op": changed("case", "op", to="../../os"),
    "no op": changed("case", "op", to="gmem"),
    "no kernel": changed("case", "kernel", to="unheard_of"),
    "markup": changed("case", "kernel", to=MARKUP),
    "files": changed("load", to=["/tmp/x.py"] * 101),
    "a file": changed("load", to=["/tmp/x.py"]),
    "no file": changed("load", to=[3]),
    "data": changed("case", "data", to="gauss"),
    "seed": changed("case", "data_seed", to=-1),
    "another seed": changed("case", "data_seed", to=10**30),
    "far": changed("case", "offset", to=1 << 40),
    "padding": changed("case", "layout", to={"x": [1 << 40, 0]}),
    "negative padding": changed("case", "layout", to={"x": [-8, 0]}),
    "three": changed("case", "layout", to={"x": [1, 2, 3]}),
    "size": changed("case", "problem", "m", to=10**30),
    "negative size": changed("case", "problem", "m", to=-1),
    "half a row": changed("case", "problem", "m", to=0.5),
    "no number": changed("case", "problem", "m", to=math.nan),
    "more than there is": changed("case", "problem", "m", to=1 << 40),
    "block": changed("case", "problem", "block", to=7),
    "field": changed("case", "problem", "colour", to="red"),
    "config": changed("case", "config", to={"warps": 8}),
    "other": changed("case", "other", to={"kernel": "unheard_of", "config": {}}),
    "no other": changed("case", "other", to=3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_case_is_told_in_a_line(name, reproduce):
    code, lines = reproduce(HOSTILE[name])
    assert code == 2, lines
    assert len(lines) == 1
    assert lines[0].startswith("jetfire: ")
    assert len(lines[0]) < 800


def test_a_good_case_is_run(reproduce):
    assert reproduce(json.dumps(good()).encode()) == (0, [])


def test_what_is_saved_can_be_read_again(tmp_path, monkeypatch):
    """Whatever a kernel that raised has said."""
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path))
    case = Example("gelu", "torch", registry.get("gelu").Problem(3, 11).as_dict(), {})
    store.save(Failure(case, ESC + "\ud800\r" + "x" * 10**7, "raised"), CPU)
    found = store.find(case.id)
    assert found.case == case
    assert found.message.startswith(r"\x1b]0;title\x07\x1b[2J\ud800\rxxx")


@few
@given(data=st.data())
def test_a_mutated_case_is_run_or_told(reproduce, data):
    content = json.dumps(good()).encode()
    if data.draw(st.booleans()):
        changed = data.draw(damaged(content))
    else:
        changed = json.dumps(data.draw(mutated(good()))).encode()
    code, lines = reproduce(changed)
    assert code in (0, 2, 3), lines
    assert len(lines) == (code != 0)
