"""Where a command writes to: a reader that leaves, a full disk, a closed stream."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys

import pytest
import torch

from jetfire.bench import catalogue
from jetfire.cli import execute
from jetfire.core.terminal import MOST, line, visible

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")


def results(tmp_path, name, ms):
    """A results file of one kernel's row."""
    row = {
        "op": "gemm",
        "kernel": "int_mm",
        "role": "kernel",
        "config": {},
        "data": "normal",
        "problem": {"m": 64, "n": 64, "k": 64, "block": 32},
        "ok": True,
        "ms": ms,
        "ms_p20": ms,
        "ms_p80": ms,
        "samples": 9,
    }
    file = tmp_path / name
    file.write_text(
        json.dumps({"schema": 1, "device": {"name": "A", "kind": "cpu"}, "rows": [row]})
    )
    return str(file)


@contextlib.contextmanager
def unread():
    """stdout is a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        yield


def test_a_reader_that_has_had_enough_is_no_error(capsys):
    with unread():
        assert execute(None, ["list"]) == 0
    assert capsys.readouterr().err == ""


def test_a_verdict_stands_whoever_reads_it(tmp_path, capsys):
    """Rich ended the process with 1 where a table's reader had gone."""
    words = ["compare", results(tmp_path, "a.json", 1.0), results(tmp_path, "b.json", 2.0)]
    with unread():
        assert execute(None, words) == 0
    with unread():
        assert execute(None, [*words, "--fail-on-regression", "5%"]) == 4
    (said,) = capsys.readouterr().err.splitlines()
    assert "regressed: 1 slower by more than 5%" in said


@pytest.mark.parametrize("words", ["list", "--help"])
def test_head_gets_its_lines_and_the_command_ends_well(words):
    script = f"set -o pipefail; {sys.executable} -m jetfire.cli {words} | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@needs_full
@pytest.mark.parametrize("words", [["list"], ["--help"], ["--version"], ["completion", "bash"]])
def test_a_full_disk_under_stdout_is_one_line_and_exits_2(words, capsys, monkeypatch):
    with open(FULL, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert execute(None, words) == 2
        monkeypatch.undo()
    said = "jetfire: standard output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said


@needs_full
def test_tables_on_a_full_disk_are_one_line_too(tmp_path, capsys, monkeypatch):
    words = ["compare", results(tmp_path, "a.json", 1.0), results(tmp_path, "b.json", 2.0)]
    with open(FULL, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert execute(None, words) == 2
        monkeypatch.undo()
    assert capsys.readouterr().err.startswith(
        "jetfire: standard output cannot be written: No space"
    )


@needs_full
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        ("> /dev/full", 2, "jetfire: standard output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("> /dev/null 2> /dev/full", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_a_process_ends_as_it_should_whatever_its_streams_are(redirection, code, said):
    script = f"{sys.executable} -m jetfire.cli list {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


@needs_full
def test_errors_that_cannot_be_printed_change_no_code(capsys, monkeypatch):
    with open(FULL, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert execute(None, ["frob"]) == 2
        monkeypatch.undo()


def test_a_locale_without_our_signs_gets_escapes(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(catalogue, "listing", lambda _: "8192×8192 \udc80")
    assert execute(None, ["list"]) == 0
    assert out.buffer.getvalue() == b"8192\\xd78192 \\udc80\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "/x/y: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "cc"), 2, "cc: No such file"),
        (MemoryError(), 2, "out of memory: expected smaller sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 TB"), 2, "out of memory: "),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 2, "out of memory: "),
        (type("OutOfMemoryError", (Exception,), {})("CuPy's"), 2, "out of memory: "),
        (OSError("odd"), 1, "internal error: OSError: odd (--debug shows more)"),
        (ValueError("a\x1b[31m\nb"), 1, r"internal error: ValueError: a\x1b[31m b (--debug"),
    ],
)
def test_what_the_system_refuses_is_no_internal_error(error, code, said, capsys, monkeypatch):
    def refuse(found):
        raise error

    monkeypatch.setattr(catalogue, "listing", refuse)
    assert execute(None, ["list"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"jetfire: {said}")
    assert err.count("\n") == 1


def test_lines_are_single_visible_and_not_too_long():
    assert line(" a\n b\tc ") == "a b c"
    assert (
        visible("\x1b]0;x\x07 \x9b \u202e \u2028 ok\n")
        == r"\x1b]0;x\x07 \x9b \u202e \u2028 ok" + "\n"
    )
    long = line("x" * 10**6 + " expected one of a, b")
    assert len(long) <= MOST + 3
    assert long.endswith("expected one of a, b")
