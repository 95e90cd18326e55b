"""Options of a command from a file: what a file says, what wins, and what is refused."""

import json

import pytest

from jetfire.cli import execute
from jetfire.gpt2.training import options as training
from jetfire.gpt2.training.settings import make


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """What `bench --dry-run` would measure with a file of options: exit code, lines, errors."""
    monkeypatch.chdir(tmp_path)

    def run(text, *words):
        (tmp_path / "run.toml").write_text(text)
        code = execute("bench", [*words, "--options", "run.toml", "--dry-run", "--device", "cpu"])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


ALL = """
op = "gemm"
m = [33, 65]
n = 64
block = 32
kernel = ["int_mm"]
dry-run = true
append = false

[set]
out = ["fp32", "bf16"]
bias = true
"""


def test_a_file_gives_options_lists_tables_and_words(planned):
    code, lines, err = planned(ALL)
    assert (code, err) == (0, "")
    cases = [line for line in lines if line.startswith("gemm")]
    assert [line.split()[1] for line in cases] == ["m=33", "m=33", "m=65", "m=65"]
    assert all("n=64" in line and "bias=True" in line for line in cases)
    assert ["fp32" in line for line in cases] == [True, False, True, False]


def test_what_is_given_on_the_command_line_wins(planned):
    code, lines, err = planned("op = 'gemm'\nm = 8", "gelu", "--m", "7", "--m", "9")
    cases = [line.split()[:2] for line in lines if " block=32 " in line]
    assert (code, cases) == (0, [["gelu", "m=7"], ["gelu", "m=9"]])
    code, lines, err = planned(ALL, "--m", "7", "--set", "out=int8", "--set", "bias=false")
    assert (code, err) == (0, "")
    (case,) = (line for line in lines if line.startswith("gemm"))
    assert "m=7 n=64" in case
    assert "out=int8" in case
    assert "bias=False" in case


def test_a_file_names_no_function_that_would_be_called(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for command, key in (("advise", "model"), ("train bench", "case"), ("train tune", "case")):
        for name in ("mine:make", ":x", "a.b:c"):
            (tmp_path / "run.toml").write_text(f'{key} = "{name}"')
            assert execute(None, [*command.split(), "--options", "run.toml"]) == 2
            assert "no file says what code is run" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text('case = "hf:gpt2-350m"\ndevice = "tpu"')
    assert execute("train", ["bench", "--options", "run.toml"]) == 2
    assert "device 'tpu'" in capsys.readouterr().err


def test_a_flag_with_two_names_is_said_by_the_first(tmp_path, capsys):
    (tmp_path / "no.toml").write_text('check = false\ntarget = "toch"\n')
    words = ["gemm", "-o", str(tmp_path / "out"), "--options", str(tmp_path / "no.toml")]
    assert execute("export", [*words, "--verbose"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("no.toml: --no-check --target=toch")
    assert "no.toml: --target toch (did you mean torch?)" in said[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m = 1\nm = 2", "no TOML: Cannot overwrite a value"),
        ("m = nan", "m=nan: expected a finite number, text, true, false or null"),
        ("m = 1979-05-27", "expected a finite number, text, true, false or null"),
        ("m = [[1]]", "m=[[1]]: expected text, a number or a list of these"),
        ("m = {a = 1}", "m={'a': 1}: expected text, a number or a list of these"),
        ("set = {out = {a = 1}}", "expected text, a number or a list of these"),
        ('device = ["cpu", "cuda"]', "device=['cpu', 'cuda']: expected one value"),
        ('format = "jsn"', "--format jsn (did you mean json?)"),
        ('data = ""', "--data '': expected a value"),
        ("json = true", "run.toml: json: expected --json on the command line"),
        ('options = "run.toml"', "run.toml: options: expected --options on the command line"),
        ('load = ["mine.py"]', "load: no file says what code is run: expected --load FILE.py"),
        ("m = " + "[" * 9000, "run.toml: "),
        ("m = " + "9" * 9000, "no TOML: Exceeds the limit"),
        ("\n".join(f"a{i} = 1" for i in range(200)), "at most 100 entries"),
        (" " * 70000, "more than 65536 bytes: expected at most that many"),
        ('"\\u001b[31m" = 1', r"\x1b[31m"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(planned, text, says):
    code, lines, err = planned(text, "gemm")
    assert (code, lines) == (2, [])
    assert err.startswith("jetfire: run.toml: ")
    assert says in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.fixture
def settings(tmp_path):
    """Write a run's settings.json."""

    def save(processes=1, **changed):
        made = make("tiny", {"recipe": "bf16", "width": 64, "data": "python", **changed})
        file = tmp_path / "settings.json"
        file.write_text(json.dumps({**made.as_dict(), "processes": processes}))
        return file, made

    return save


def begun(monkeypatch, *words):
    """The settings that `jetfire train` would begin with."""
    found = []
    monkeypatch.setattr(training, "request_of", lambda asked: found.append(asked.begun()))
    monkeypatch.setattr("jetfire.gpt2.training.command.train", lambda asked: None)
    assert execute("train", list(words)) == 0
    return found[0]


def test_a_run_s_settings_begin_it_again(settings, monkeypatch, tmp_path):
    data = tmp_path / "a, b"
    data.mkdir()
    file, made = settings(data=str(data), steps=70, beta2=0.99)
    assert begun(monkeypatch, "--options", str(file)) == made
    again = begun(monkeypatch, "--options", str(file), "--seed", "5", "--set", "batch=2")
    expected = made.as_dict() | {"seed": 5, "batch": 2}
    assert again.as_dict() == expected
    # `--set seed=5` is what `--seed 5` is, whichever of them either says.
    assert begun(monkeypatch, "--options", str(file), "--set", "seed=5").seed == 5
    assert begun(monkeypatch, "--options", str(file), "--set", "data=python").data == "python"
    own = tmp_path / "own.toml"
    own.write_text('preset = "tiny"\nseed = 5\n[set]\nsteps = 6\nwatch = 2\nrecipe = "bf16"')
    words = ["--options", str(own), "--set", "seed=7,batch=2", "--steps", "8", "--watch", "0"]
    found = begun(monkeypatch, *words)
    assert (found.seed, found.steps, found.watch, found.recipe) == (7, 8, 0, "bf16")
    assert begun(monkeypatch, "tiny", "--options", str(file)) == made


def test_a_run_s_settings_begin_no_other_preset(settings, capsys, tmp_path):
    file, _ = settings()
    for more in ([], ["--set", "family=gpt2"]):
        words = ["tiny-llama", "--options", str(file), *more, "-o", str(tmp_path / "run")]
        assert execute("train", words) == 2
        assert capsys.readouterr().err == (
            f"jetfire: preset tiny-llama: expected tiny, as {file} has it, or none beside it\n"
        )
    assert not (tmp_path / "run").exists()


def test_a_run_of_several_processes_begins_with_as_many_micro_batches(settings, monkeypatch):
    file, _ = settings(processes=4, accumulate=3, parallel="ddp")
    assert training.of_run(file)["set"]["accumulate"] == 12
    told = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in {**told, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert training.of_run(file)["set"]["accumulate"] == 6
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(training.UsageError, match="12 in all: expected processes that divide"):
        training.of_run(file)
