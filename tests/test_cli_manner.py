"""How every command speaks: one JSON document, or few words, or more."""

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import pytest

from jetfire import cli
from jetfire.cli import execute
from jetfire.commands import option_files
from jetfire.core import doctor, terminal
from jetfire.fuzz import InProcess, jobs
from jetfire.kernels_cuda import compile
from jetfire.measure import peaks

PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}
SMALL = "gemm --m 33 --block 32 --device cpu --rounds 2 --kernel int_mm --peer none"
RUN = "--recipe bf16 --device cpu --steps 2 --data x.txt"
RUN += " --set layers=1,width=32,heads=2,context=16,batch=4"
# Words that a verb takes, and the keys of its result where that takes no long time.
VERBS = {
    "bench": (SMALL, "schema device rows"),
    "compare": ("rows.json rows.json", "devices pairs gone new"),
    "history": ("rows.json", "changes"),
    "list": ("", "ops workloads peers data"),
    "fuzz": ("gemm --kernel int_mm --device cpu --examples 1", "pairs seed finished"),
    "export": ("gemm --m 64 -o out --kernel mma --no-check", None),
    "advise": ("hf:gpt2-350m", None),
    "audit": ("gemm --m 64 --kernel mma --arch 80", None),
    "report": ("rows.json --check", None),
    "new": ("softmax", "file use"),
    "completion": ("bash", "scripts"),
    "doctor": ("", "parts"),
    "tune": ("transpose --m 64 --kernel tiles --dry-run --device cpu", None),
    "tune show": ("gemm --block 64", "profiles"),
    "train": (f"tiny {RUN} -o run", "run settings last"),
    "train prepare": ("x.txt --tokenizer byte -o tokens", "folder"),
    "train study": ("tiny -o study", None),
    "train plot": ("run -o loss.svg", "file"),
    "train sample": ("run --tokens 3 --device cpu", "text"),
    "train export": ("run -o weights", "folder"),
    "train bench": ("tiny --device cpu --dry-run", "plan"),
    "train tune": ("tiny --device cpu --dry-run", None),
    "train plan": ("tiny", "settings needs_gib"),
}


def commands(group, before=()):
    """Every command of the app by its words, as they are typed."""
    for name, one in group.commands.items():
        words = before if one.hidden else (*before, name)
        if hasattr(one, "commands"):
            yield from commands(one, words)
        else:
            yield " ".join(words), one


COMMANDS = dict(commands(cli._commands()))


def test_every_verb_is_tried_here():
    assert set(VERBS) == set(COMMANDS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_can_say_all_of_it_but_how_it_speaks(verb):
    params = COMMANDS[verb].params
    said = {name[2:] for param in params for name in param.opts} & set(option_files.ELSEWHERE)
    assert {"json", "quiet", "verbose", "options", "debug"} <= said
    assert len(option_files.keys(params)) == len(params) - len(said)  # no two have one key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, a run on it, and rows."""
    here = tmp_path_factory.mktemp("here")
    (here / "x.txt").write_text("The kernel runs on text. " * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("JETFIRE_CACHE", str(here / "cache"))
        patch.setattr(peaks, "cached", lambda *_: PEAKS)
        assert execute("train", f"tiny {RUN} -o run".split()) == 0
        assert execute("bench", [*SMALL.split(), "-o", "rows.json"]) == 0
    return here


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    """A current folder with all that the verbs' words name."""
    for name in ("x.txt", "rows.json", "run"):
        (tmp_path / name).symlink_to(folder / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JETFIRE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    found = [doctor.Finding("disk", True, "lots")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    monkeypatch.setattr(jobs.FuzzPlan, "executor", lambda _, device: InProcess(device))
    return tmp_path


def spoken(capsys, *words):
    """A command's exit code, the one document on its stdout, and its stderr."""
    capsys.readouterr()
    code = execute(None, [*words, "--json"])
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert isinstance(document, dict)
    return code, document, err


@pytest.mark.parametrize("verb", [verb for verb, (_, keys) in VERBS.items() if keys])
def test_a_result_is_one_document(verb, here, capsys):
    words, keys = VERBS[verb]
    if verb == "train":
        (here / "run").unlink()
    code, document, err = spoken(capsys, *verb.split(), *words.split())
    assert (code, "error" in document) == (0, False), err
    assert set(keys.split()) <= set(document)
    assert all(document[key] is not None for key in keys.split())


TABLED = ["bench", "compare", "history", "fuzz", "audit", "tune show", "train plan"]
# Commands that take longer: their tables are given elsewhere, in `test_tuner` and `test_study`.
LONG = ["advise", "tune", "train bench", "train tune", "train study"]


def test_every_command_with_a_table_takes_a_format():
    found = {verb for verb, one in COMMANDS.items() if any(p.name == "format" for p in one.params)}
    assert found == {*TABLED, *LONG}


@pytest.fixture
def filled(monkeypatch, shipped):
    """Have audits without a compiler, and the profiles that are shipped."""
    from jetfire.bench import audit

    values = ("sm_80", "mma", "gemm_mma", 255, 0, 229376, 8, 4096, "IMMA 512")
    row = dict(zip(audit.COLUMNS, values, strict=True))
    monkeypatch.setattr(audit, "_cubins", lambda *_: [None])
    monkeypatch.setattr(audit, "audits", list)
    monkeypatch.setattr(audit, "_row", lambda *_: row)


@pytest.mark.parametrize("form", ["json", "csv", "md"])
@pytest.mark.parametrize("verb", TABLED)
def test_a_table_in_another_format(verb, form, here, filled, capsys):
    words = [*verb.split(), *VERBS[verb][0].split()]
    _, document, _ = spoken(capsys, *words)
    assert execute(None, [*words, "--format", form]) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out).keys() == document.keys()
    elif form == "csv":
        rows = list(csv.reader(io.StringIO(out)))
        assert (verb == "history") is (not rows)  # in which nothing changed
        assert len({len(row) for row in rows}) <= 1
        assert all(len(row) > 1 for row in rows)
    else:
        counts = [line.count("|") for line in out.splitlines() if line.startswith("|")]
        assert all(count > 2 for count in counts)
        assert counts


def test_an_audit_s_table_has_units(here, filled, capsys):
    assert execute(None, ["audit", *VERBS["audit"][0].split()]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "arch kernel function registers spills shared warps instructions matrix" in lines
    assert "sm_80 mma gemm_mma 255 0 224 KiB 8 4096 IMMA 512" in lines


def test_a_format_misspelt_is_refused_by_every_command(capsys):
    for verb in [*TABLED, "tune", "train tune", "train study"]:
        words = VERBS[verb][0].replace("-o study", "-o nowhere").split()
        assert execute(None, [*verb.split(), *words, "--format", "jsn"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("jetfire: --format jsn (did you mean json?): expected"), verb


def test_rows_are_what_compare_reads(here, capsys):
    _, document, _ = spoken(capsys, "bench", *SMALL.split())
    (here / "new.json").write_text(json.dumps(document))
    code, document, _ = spoken(capsys, "compare", "new.json", "new.json")
    assert (code, [pair["verdict"] for pair in document["pairs"]]) == (0, ["noise"])


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_is_one_document(verb, here, capsys, monkeypatch):
    words = [*verb.split(), *VERBS[verb][0].split()]
    code, document, err = spoken(capsys, *words, "--nope")
    assert code == 2
    assert document["error"]["exit_code"] == 2
    assert document["error"]["message"].startswith("no option --nope")
    assert err == f"jetfire: {document['error']['message']}\n"
    code, document, _ = spoken(capsys, *words, "--options", "none.toml")
    assert code == 2
    message = "none.toml: No such file or directory"
    assert document == {"error": {"message": message, "exit_code": 2}}

    def interrupted(**given):
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS[verb], "callback", interrupted)
    code, document, _ = spoken(capsys, *words)
    assert code == 130
    assert document == {"error": {"message": "interrupted", "exit_code": 130}}


@pytest.mark.parametrize("words", ["frob", "bench", "train sample", "--nope", "bench zzz"])
def test_so_is_that_of_words_without_a_verb_or_with_too_few(words, capsys):
    code, document, _ = spoken(capsys, *words.split())
    assert code == 2
    assert document["error"]["exit_code"] == 2


def test_a_result_stands_beside_the_error(here, capsys, monkeypatch):
    found = [doctor.Finding("ncu", False, "no ncu", "install it"), doctor.Finding("disk", True, "")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    code, document, _ = spoken(capsys, "doctor")
    assert code == document["error"]["exit_code"] == 1
    assert [part["ok"] for part in document["parts"]] == [False, True]


def test_a_compiler_s_lines_are_the_error_s_details(capsys, monkeypatch):
    def failing(**given):
        error = cli.JetfireError("gemm does not compile")
        error.details = "line 1\nline 2"
        raise error

    monkeypatch.setattr(COMMANDS["list"], "callback", failing)
    code, document, err = spoken(capsys, "list")
    assert code == 1
    assert document["error"]["details"] == "line 1\nline 2"
    assert err == "jetfire: gemm does not compile\nline 1\nline 2\n"


def test_what_else_is_printed_leaves_stdout_alone(capsys, monkeypatch):
    def chatty(**given):
        print("mine")
        terminal.result({"a": float("nan"), "b": (1, Path("x"))}, lambda: None)

    monkeypatch.setattr(COMMANDS["list"], "callback", chatty)
    code, document, err = spoken(capsys, "list")
    assert (code, document, err) == (0, {"a": None, "b": [1, "x"]}, "mine\n")
    assert execute("list", []) == 0
    assert capsys.readouterr().out == "mine\n"


def test_of_torchrun_s_processes_one_prints_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert execute(None, ["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)  # a variable that others set too
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert execute(None, ["list", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_stdout_that_is_full_is_an_error_there_too(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert execute(None, ["list", "--json"]) == 2
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.flush()
    assert "standard output cannot be written" in capsys.readouterr().err


def test_the_version_as_json(capsys):
    code, document, _ = spoken(capsys, "bench", "--version")
    assert code == 0
    assert document["jetfire"] == "0.1.0"
    assert set(document) == {"jetfire", "torch", "triton", "python"}


def test_quiet_leaves_the_result_and_the_error(here, capsys):
    (here / "run").unlink()
    words = f"tiny {RUN} -o run --seed 1 --seed 2".split()
    assert execute("train", [*words, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tiny bf16: loss")
    assert err == ""
    assert execute("train", [*words, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "jetfire: -o run: holds a run: --resume goes on with it; or name another\n"
    assert execute("train", ["--resume", "-o", "run", "--device", "cpu"]) == 0
    assert "jetfire: tiny (" in capsys.readouterr().err


def test_quiet_draws_nothing_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for words, shown in ((["--quiet"], False), ([], True)):
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.speaking(words):
            from jetfire.bench.progress import watch

            assert list(watch([1, 2])) == [1, 2]
            terminal.note("a note")
        assert bool(stream.getvalue()) == shown


def test_verbose_says_which_config_is_taken_from_where(here, capsys):
    assert execute("bench", [*SMALL.split(), "--verbose"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "default config" in line]
    assert len(said) == 1
    assert said[0].startswith("jetfire: gemm m=33 n=33 k=33 block=32")
    assert execute("bench", SMALL.split()) == 0
    assert "default config" not in capsys.readouterr().err


def test_verbose_says_what_is_compiled_and_what_was_before(tmp_path, capsys, monkeypatch):
    whole = b"\x7fELF" + bytes(60)
    monkeypatch.setattr(compile, "_compile", lambda *_: whole)
    monkeypatch.setattr(compile, "_nvrtc_version", lambda: (13, 0))
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "new"))
    source = compile.CudaText(tmp_path / "mine.py", 1, "// nothing")
    for words in (["--verbose"], ["--verbose"], []):
        with terminal.speaking(words):
            assert compile.compile_cubin(source, "", "sm_90a") == whole
    first, second = capsys.readouterr().err.splitlines()
    assert "mine.py for sm_90a: compiled in " in first
    assert "mine.py for sm_90a: compiled before, " in second


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (
            [
                "tune",
                "--replay",
                "no.json.gz",
                "--m",
                "7",
                "--kernel",
                "wgmma",
                "--set",
                "out=int8",
            ],
            "--m, --set, --kernel",
        ),
        (
            ["tune", "--replay", "no.json.gz", "--report", "r.html", "--dry-run"],
            "--report, --dry-run",
        ),
        (
            ["fuzz", "--reproduce", "gelu-torch-0", "-o", "f.json", "--examples", "3"],
            "--examples, --output",
        ),
    ],
)
def test_an_option_without_effect_is_refused(words, lost, capsys):
    name, *rest = words
    assert execute(name, rest) == 2
    assert f"leave out {lost}: no effect beside it" in capsys.readouterr().err
