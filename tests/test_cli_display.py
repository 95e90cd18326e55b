"""What is shown of names from elsewhere, which may hold markup or control characters; progress."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from jetfire.bench import audit, progress
from jetfire.cli import execute
from jetfire.core import registry, terminal
from jetfire.core.device import target_device
from jetfire.gpt2.training.display import TrainingDisplay as Training
from jetfire.kernels_triton.kernel import TritonKernel
from jetfire.measure.plan import Case
from jetfire.measure.results import Row
from jetfire.report import show
from jetfire.tuner import show as profiles
from jetfire.tuner.display import SearchDisplay as Search
from jetfire.tuner.trial import Measurement

# A tag that closes nothing, which Rich refuses; one that would colour; a title and a colour by ESC.
EVIL = "[/] [red]x[/red] :smile: \x1b]0;owned\x07 \x1b[31m"
SEEN = r"[/] [red]x[/red] :smile: \x1b]0;owned\x07 \x1b[31m"


def printed(renderable, capsys, **options):
    terminal.console(width=400).print(renderable, **options)
    return capsys.readouterr().out


def row(name):
    return Row(name, name, "kernel", {"m": 8, "n": 8, "name": name}, ok=True, ms=1.0, data=name)


def test_tables_and_headings_of_rows(capsys):
    rows = [row(EVIL)]
    text = printed(show.heading(EVIL, rows), capsys)
    assert text.count(SEEN) == 3
    text = printed(show.table(rows), capsys)
    assert SEEN in text
    assert "\x1b" not in text


def test_strings_are_printed_as_they_are(capsys):
    assert printed(EVIL, capsys) == SEEN + "\n"
    assert printed(terminal.styled(EVIL, "bold"), capsys) == SEEN + "\n"


@pytest.mark.parametrize(("tty", "shown"), [(True, SEEN), (False, EVIL)])
def test_a_model_s_text_cannot_drive_a_terminal(tty, shown, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty, raising=False)
    terminal.show(EVIL)
    assert capsys.readouterr().out == shown + "\n"


def test_our_own_styles_still_reach_a_terminal():
    file = io.StringIO()
    console = terminal.console()
    shown = Console(file=file, force_terminal=True, color_system="standard", width=80)
    shown.print(show.heading("title", [row("gemm")]))
    assert "\x1b[1mgemm" in file.getvalue()
    assert not console._markup


def test_the_tuner_s_table_and_lines(capsys):
    search = Search("time", 1)
    search.begin(EVIL, 3, 60.0, [])
    search.note(EVIL)
    assert capsys.readouterr().err.splitlines() == [f"jetfire: [1/1] {SEEN}", f"jetfire: {SEEN}"]
    assert SEEN in " ".join(printed(search.table(), capsys).split())  # a title is folded


def test_the_trainer_s_lines(capsys):
    with Training(0, 10) as display:
        display._line(EVIL)
        display._progress = progress_on(file := io.StringIO())
        display._line(EVIL)
        display._progress = None
    assert SEEN in file.getvalue()


def progress_on(file):
    """A progress display whose console is ours, but for where it writes."""
    from rich.progress import Progress

    console = terminal.console(stderr=True)
    console.file = file
    return Progress(console=console)


def test_profiles_of_a_strange_device(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiles, "time_text", lambda _: EVIL)
    entry = profiles.Entry(
        kernel=EVIL,
        problem={"m": 8, "n": 8},
        config={"x": EVIL},
        ms=1.0,
        ms_p20=1.0,
        ms_p80=1.0,
        samples=9,
        default_ms=None,
        joules=None,
        objective="time",
        vs_peer={},
        trials=1,
        strategy=EVIL,
        provenance={"date": EVIL, "gpu": EVIL},
    )
    profile = profiles.Profile(tmp_path, "user", EVIL, "gemm", [entry])
    monkeypatch.setattr(profiles, "found", lambda *_: [profile])
    wide = terminal.console(width=400)
    monkeypatch.setattr(terminal, "console", lambda width: wide)
    profiles.show([], None)
    heading, table = capsys.readouterr().out.split("\n", 1)
    assert SEEN in heading
    assert table.count(SEEN) == 4


@pytest.mark.parametrize(
    "words",
    [
        ["bench", EVIL],
        ["bench", "gemm", "--kernel", EVIL],
        ["bench", "gemm", "--peer", EVIL],
        ["bench", "gemm", "--device", EVIL],
        ["bench", "gemm", f"--{EVIL}", "1"],
        ["bench", "gemm", "--set", f"{EVIL}=1"],
        ["bench", "gemm", "--m", EVIL],
        ["compare", EVIL, EVIL],
        ["history", EVIL],
        [EVIL],
        ["train", EVIL],
        ["train", "sample", EVIL],
        ["tune", "gemm", "--strategy", EVIL],
        ["tune", "gemm", "--storage", EVIL, "--m", EVIL],
        ["export", "gemm", "-o", "new", "--name", EVIL],
        ["fuzz", "gelu", "--reproduce", EVIL],
        ["train", "plot", EVIL, "-o", f"{EVIL}.svg"],
        ["completion", EVIL],
    ],
    ids=lambda words: " ".join(words[:-1]),
)
def test_a_name_from_the_command_line_is_shown_in_one_line_as_it_is(words, capsys):
    assert execute(None, words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert r"\x1b[31m" in captured.err
    assert "\x1b" not in captured.err


def test_an_audit_says_what_it_compiles(capsys, monkeypatch):
    monkeypatch.setattr(TritonKernel, "cubins", lambda *_: [])
    op = registry.get("transpose")
    cases = [Case(op, op.Problem(m=64, n=64, block=block)) for block in (32, 64)]
    devices = [target_device((8, 0)), target_device((9, 0))]
    for pause, lines in ((0.0, 4), (60.0, 1)):
        monkeypatch.setattr(audit, "PAUSE_S", pause)
        with pytest.raises(audit.UsageError, match=r"no kernel .* triton: has no machine code"):
            audit.run(cases, [], devices)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == lines
        assert said[0] == "[1/4] sm_80 triton: transpose m=64 n=64 block=32"


def test_lines_of_progress_keep_their_distance(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for _ in progress.watch(range(10), str, pause_s=3.0):
        now[0] += 1
    assert capsys.readouterr().err.split() == [
        "[1/10]",
        "0",
        "[4/10]",
        "3",
        "[7/10]",
        "6",
        "[10/10]",
        "9",
    ]


def test_measurements_with_markup_are_lines_of_their_own(capsys):
    search = Search("time", 1)
    config = registry.get_kernel("transpose", "triton").Config()
    search.trial(config, Measurement("crash", message=f"{EVIL}\nmore"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(SEEN)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_says_what_it_installs_and_lets_pip_show_how_far_it_is(tmp_path):
    root = Path(terminal.__file__).parent.parent
    words = ["make", "-n", "-C", str(root), f"VENV={tmp_path}/venv", "bench"]
    ours = ("MAKE", "MFLAGS", "PY", "VENV")  # of the make that runs the tests
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "Installing into" in done.stdout
    (install,) = (line for line in done.stdout.splitlines() if "pip install" in line)
    assert " -q" not in install
