"""The command line as a user meets it: help at once, one line and the right exit code on errors."""

import json
import subprocess
import sys

import pytest

from jetfire import cli
from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.errors import UsageError
from jetfire.measure import peaks, plan
from jetfire.measure.results import Results
from jetfire.measure.runner import Runner
from jetfire.measure.timer import VERSION

HEAVY = ("torch", "triton", "numpy", "matplotlib", "optuna", "cupy", "pynvml")
SMALL = ["gemm", "--m", "33", "--block", "32", "--device", "cpu", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _peaks(monkeypatch):
    """Peaks are measured once for a user, not for each test."""
    found = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}
    monkeypatch.setattr(peaks, "cached", lambda *_: found)


def bench(*arguments: str) -> int:
    return execute("bench", list(arguments))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["bench", "--help"], ["compare", "--help"], ["train", "--help"]]
)
def test_help_loads_nothing_heavy(arguments):
    code = (
        "import sys; from jetfire.cli import execute; code = execute(None, sys.argv[1:]); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("[] 0")
    assert "Usage: jetfire" in done.stdout


def test_scripts_are_the_subcommands(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "run", lambda command=None: seen.append(command))
    for name in ("main", "bench_main", "tune_main", "fuzz_main", "export_main", "train_main"):
        getattr(cli, name)()
    assert seen == [None, "bench", "tune", "fuzz", "export", "train"]


USAGE = [
    (["--m", "64"], "which op? expected one of"),
    (["zzz"], "no op 'zzz': expected one of"),
    (["gemm", "--m", "-5"], "--m -5: expected a size of at least 1"),
    (["gemm", "--m", "x"], "--m x: expected a size"),
    (["gemm", "--m", "1:2"], "--m 1:2: expected a size"),
    (["gemm", "--m", "8:4:1"], "stops before it starts"),
    (["gemm", "--m", "8:16:0"], "--m 8:16:0: expected"),
    (["gemm", "--nope", "1"], "no option --nope: expected one of --m"),
    (["gemm", "--m"], "'--m' requires an argument"),
    (["gemm", "--seed", "x"], "--seed x: expected an integer"),
    (["gemm", "--rounds", "0"], "--rounds 0: expected at least 1"),
    (["gemm", "--kernel", "nope"], "no kernel 'nope': expected one of int_mm"),
    (["gemm", "--peer", "nope"], "no peer 'nope': expected one of cublas_bf16"),
    (["gemm", "--workload", "nope"], "no workload 'nope': expected one of gpt2-124m"),
    (["gemm", "--workload", "square", "--m", "8"], "has its own sizes"),
    (["gemm", "--mode", "nope"], "--mode nope: expected fwd, bwd"),
    (["gemm", "--data", "nope"], "--data nope: expected one of normal"),
    (["gemm", "--device", "tpu"], "device 'tpu': expected auto, cpu, cuda"),
    (["gemm", "--format", "xml"], "--format xml: expected one of table, json, csv, md"),
    (["gemm", "--block", "33"], "block=33: expected 32 or 64 or 128"),
    (["gemm", "--set", "nope=1"], "no problem field 'nope': expected one of m"),
    (["gemm", "--set", "out"], "--set out: expected field=value"),
    (["gemm", "--set", "out=int7"], "out=int7 (did you mean int8?): expected one of bf16"),
    (["gemm", "--set", "m=8"], "--set m=…: expected --m"),
    (["gemm", "--config", "nope=1"], "no config field 'nope': expected one of"),
    (["gemm", "--config", "tile_m=64,128"], "expected one value"),
    ([*SMALL, "--config", "tile_m=64"], "no config field 'tile_m': these kernels have none"),
    ([*SMALL, "--config", "tile_m=64", "--dry-run"], "no config field 'tile_m': these kernels"),
    (["quantize", "--k", "8"], "--k: quantize has only m and n"),
    (["quantize", "--mode", "bwd"], "quantize has no mode 'bwd': expected fwd"),
    (["gemm", "--append"], "--append: expected -o FILE.json"),
    (["gemm", "-o", "x.txt"], "-o x.txt: expected a file named .json"),
    (["gemm", "-o", "/none/x.json"], "/none/x.json: cannot be written: No such file"),
    (["gemm", "--plot", "x.bmp"], "--plot x.bmp: expected a file named .png"),
    (["gemm", "--plot", "/none/x.png"], "/none/x.png: cannot be written"),
    (["--suite", "nope"], "--suite nope: expected one of results"),
    (["gemm", "--suite", "gemm"], "says itself what is measured"),
]


@pytest.mark.parametrize(("arguments", "says"), USAGE, ids=[" ".join(a) for a, _ in USAGE])
def test_usage_errors_are_one_line_and_exit_2(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    assert bench(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jetfire: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_an_unknown_command_lists_those_there_are(capsys):
    assert execute(None, ["frob"]) == 2
    assert "'frob': expected one of bench, " in capsys.readouterr().err


def test_no_such_gpu_exits_5(capsys):
    assert bench("gemm", "--m", "64", "--device", "cuda:99") == 5
    message = capsys.readouterr().err
    assert "device 'cuda:99': this machine has" in message
    assert message.count("\n") == 1


def test_an_unexpected_error_is_one_line_and_exits_1(capsys, monkeypatch):
    monkeypatch.setattr(plan, "cases", lambda *_: 1 / 0)
    assert bench(*SMALL) == 1
    message = capsys.readouterr().err
    assert message == (
        "jetfire: internal error: ZeroDivisionError: division by zero (--debug shows more)\n"
    )
    assert bench(*SMALL, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_list_names_everything(capsys):
    assert bench("--list") == 0
    text = capsys.readouterr().out
    for name in (*registry.names(), "int_mm", "gpt2-350m", "cublas_bf16", "outlier"):
        assert name in text
    assert execute(None, ["list"]) == 0
    assert capsys.readouterr().out == text


def test_dry_run_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    assert bench("gemm", "--m", "64,128", "--block", "32", "--dry-run", "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert "2 problems" in text
    assert text.count("int_mm") == 2


def test_a_config_of_kernels_that_are_not_for_this_device_is_no_mistake(capsys):
    named = [*SMALL, "--kernel", "wgmma", "--config", "stages=3"]
    assert bench(*named) == 5
    assert "gemm/wgmma does not run on" in capsys.readouterr().err
    assert bench(*named, "--dry-run") == 0
    assert "wgmma left out: needs sm_90" in capsys.readouterr().out


def test_the_whole_way_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "r.json"
    assert bench(*SMALL, "-o", str(file)) == 0
    captured = capsys.readouterr()
    assert "no figure here says anything about a GPU" in captured.out
    assert "no GPU in use" in captured.err
    assert captured.out.rstrip().endswith(
        "jetfire bench gemm --m 33 --block 32 --device cpu --seed 0 --rounds 2"
    )
    content = json.loads(file.read_text())
    kernel, *peers = content["rows"]
    assert kernel["kernel"] == "int_mm"
    assert kernel["ok"] is True
    assert kernel["ms"] > 0
    assert set(kernel["vs_peer"]) == {"fp32_matmul", "bf16_matmul"}
    assert {row["kernel"] for row in peers} == {"fp32_matmul", "bf16_matmul"}
    assert content["device"]["kind"] == "cpu"
    for name, ratio in kernel["vs_peer"].items():
        peer = next(row for row in peers if row["kernel"] == name)
        assert ratio == pytest.approx(peer["ms"] / kernel["ms"], rel=1e-4)


def test_the_replay_command_measures_the_same(capsys):
    words = [
        "gemm",
        "--m",
        "16,32",
        "--n",
        "8",
        "--block",
        "64",
        "--set",
        "out=int8",
        "--set",
        "rounding=nearest,stochastic",
        "--peer",
        "fp32_matmul",
        "--data",
        "outlier",
        "--device",
        "cpu",
        "--seed",
        "7",
        "--rounds",
        "2",
    ]
    assert bench(*words) == 0
    first = capsys.readouterr().out
    replay = first.rstrip().splitlines()[-1].split()
    assert replay[:2] == ["jetfire", "bench"]
    assert execute(None, replay[1:]) == 0
    again = capsys.readouterr().out

    def problems(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if "×8×" in line]

    assert problems(again) == problems(first)
    assert len(problems(first)) == 4


@pytest.mark.parametrize("kind", ["json", "csv", "md"])
def test_formats_on_stdout(kind, capsys):
    assert bench(*SMALL, "--format", kind) == 0
    text = capsys.readouterr().out
    if kind == "json":
        assert json.loads(text)["rows"]
    elif kind == "csv":
        assert text.splitlines()[0].startswith("op,kernel,role,problem.m")
    else:
        assert "| problem | kernel |" in text


def test_append_replaces_and_adds(tmp_path, capsys):
    file = tmp_path / "r.json"
    assert bench(*SMALL, "-o", str(file), "--peer", "none") == 0
    before = json.loads(file.read_text())["rows"]
    more = ["gemm", "--m", "33,40", "--block", "32", "--device", "cpu", "--rounds", "3"]
    assert bench(*more, "-o", str(file), "--append", "--peer", "none") == 0
    after = json.loads(file.read_text())["rows"]
    assert [row["problem"]["m"] for row in after] == [33, 40]
    assert (before[0]["samples"], after[0]["samples"]) == (2, 3)
    file.write_text(file.read_text().replace('"name"', '"name": "Other", "was"'))
    capsys.readouterr()
    assert bench(*SMALL, "-o", str(file), "--append") == 2
    assert "it was measured on Other" in capsys.readouterr().err


def test_append_keeps_what_earlier_rows_were_measured_with(tmp_path):
    file = tmp_path / "r.json"
    assert bench(*SMALL, "-o", str(file), "--peer", "none") == 0
    before = json.loads(file.read_text())
    before["device"]["timer"] = 1
    file.write_text(json.dumps(before))
    other = ["gemm", "--m", "40", *SMALL[3:]]
    assert bench(*other, "-o", str(file), "--append", "--peer", "none") == 0
    results = Results.load(file)
    timers = [(row.problem["m"], results.measured(row)["timer"]) for row in results.rows]
    assert timers == [(33, 1), (40, VERSION)]


def test_rows_that_another_bench_adds_meanwhile_stay(tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    assert bench(*SMALL, "-o", str(file), "--peer", "none") == 0
    measure = Runner.measure

    def beside_another(self, *arguments):
        held = json.loads(file.read_text())
        other = {**held["rows"][0], "problem": {**held["rows"][0]["problem"], "m": 99}}
        file.write_text(json.dumps({**held, "rows": [*held["rows"], other]}))
        return measure(self, *arguments)

    monkeypatch.setattr(Runner, "measure", beside_another)
    words = ["gemm", "--m", "40", "--block", "32", "--device", "cpu", "--rounds", "2"]
    assert bench(*words, "-o", str(file), "--append", "--peer", "none") == 0
    assert [row["problem"]["m"] for row in json.loads(file.read_text())["rows"]] == [33, 99, 40]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "code", "rows"),
    [
        ('{"schema": 1, "device": {"name": "Other"}, "rows": []}', 2, []),
        ("broken", 0, [33, 40]),
    ],
)
def test_a_file_that_changes_meanwhile(content, code, rows, tmp_path, capsys, monkeypatch):
    """Rows are not added to another device's, and what they were to be added to is not lost."""
    file = tmp_path / "r.json"
    assert bench(*SMALL, "-o", str(file), "--peer", "none") == 0
    measure = Runner.measure

    def beside_another(self, *arguments):
        file.write_text(content)
        return measure(self, *arguments)

    monkeypatch.setattr(Runner, "measure", beside_another)
    words = ["gemm", "--m", "40", "--block", "32", "--device", "cpu", "--rounds", "2"]
    capsys.readouterr()
    assert bench(*words, "-o", str(file), "--append", "--peer", "none") == code
    said = capsys.readouterr()
    assert "40×40×40" in said.out
    assert ("it was measured on Other" in said.err) == (code == 2)
    assert [row["problem"]["m"] for row in json.loads(file.read_text())["rows"]] == rows


def test_ctrl_c_shows_and_saves_what_there_is(tmp_path, capsys, monkeypatch):
    measure, calls = Runner.measure, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    monkeypatch.setattr(Runner, "measure", interrupted)
    file = tmp_path / "r.json"
    words = ["gemm", "--m", "16,24,32", "--block", "32", "--device", "cpu", "--rounds", "2"]
    assert bench(*words, "-o", str(file)) == 130
    captured = capsys.readouterr()
    assert "16×16×16" in captured.out
    assert captured.err.splitlines()[-1] == "jetfire: interrupted after 3 rows, shown and saved"
    assert {row["problem"]["m"] for row in json.loads(file.read_text())["rows"]} == {16}


@pytest.mark.parametrize(("before", "said"), [(1, "3 rows, shown"), (0, "0 rows")])
def test_ctrl_c_says_of_nothing_that_it_was_saved(before, said, capsys, monkeypatch):
    measure, calls = Runner.measure, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) > before:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    monkeypatch.setattr(Runner, "measure", interrupted)
    words = ["gemm", "--m", "16,24", "--block", "32", "--device", "cpu", "--rounds", "2"]
    assert bench(*words) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"jetfire: interrupted after {said}"


def test_ctrl_c_before_anything(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "cases", interrupt)
    assert bench(*SMALL) == 130
    assert capsys.readouterr().err == "jetfire: interrupted\n"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512", [512]),
        ("1024:4096:1024", [1024, 2048, 3072, 4096]),
        ("10:25:10", [10, 20]),
        ("8,8,1:3:1", [8, 1, 2, 3]),
    ],
)
def test_sizes(text, sizes):
    assert plan.parse_sizes("--m", text) == sizes


def cases(*names: str, notes: list[str] | None = None, **request):
    said: list[str] = [] if notes is None else notes
    sizes = request.pop("sizes", {"m": [64]})
    return plan.cases(plan.Request(plan.choose_ops(names), sizes=sizes, **request), said.append)


def test_dimensions_follow_m():
    shapes = [
        (c.problem.m, c.problem.n, c.problem.k)
        for c in cases("gemm", sizes={"m": [8, 16], "n": [4]}, blocks=["32"])
    ]
    assert shapes == [(8, 4, 8), (16, 4, 16)]


def test_all_three_blocks_by_default_and_shapes_stand_together():
    found = cases("gemm", sizes={"m": [8, 16]})
    assert [(c.problem.m, c.problem.block) for c in found] == [
        (m, block) for m in (8, 16) for block in (32, 64, 128)
    ]


def test_backward_gemm_is_dgrad_and_wgrad():
    found = cases("gemm", modes=["bwd"], sizes={"m": [8], "n": [16], "k": [32]}, blocks=["32"])
    assert [(c.problem.m, c.problem.n, c.problem.k, c.problem.accumulate) for c in found] == [
        (8, 32, 16, False),
        (16, 32, 8, True),
    ]


def test_ops_that_lack_a_field_or_a_mode_are_told_of():
    notes: list[str] = []
    found = cases("gemm", "quantize", modes=["bwd"], settings={"bias": ["true"]}, notes=notes)
    assert {c.op.name for c in found} == {"gemm"}
    assert any("quantize: no field 'bias'" in text for text in notes)
    assert any("quantize: no mode 'bwd'" in text for text in notes)


def test_of_several_ops_those_that_refuse_a_size_are_left_out_and_told_of():
    notes: list[str] = []
    found = cases("quantize", "bit_split", sizes={"m": [33, 64]}, blocks=["32"], notes=notes)
    assert [(c.op.name, c.problem.n) for c in found] == [
        ("quantize", 33),
        ("quantize", 64),
        ("bit_split", 64),
    ]
    assert notes[1:] == ["bit_split: n=33: expected an even number, of two codes a byte: left out"]
    assert cases("all", sizes={"m": [33]})
    for names in (["bit_split"], ["bit_split", "gather_rows"]):
        with pytest.raises(UsageError, match=r"^n=33: expected an even number"):
            cases(*names, sizes={"m": [33]})
    with pytest.raises(UsageError, match=r"^bits=5: expected 8 or 4$"):
        cases("quantize", "bit_split", settings={"bits": ["5"]})


def test_all_is_every_op_once():
    assert {c.op.name for c in cases("all", "gemm", blocks=["32"])} == set(registry.names())
    with pytest.raises(UsageError, match="no op"):
        cases("gemm", "nope")


@pytest.mark.parametrize("suite", ["results", "int4"])
def test_a_suite_of_a_gpus_sizes_is_refused_without_one(suite, capsys):
    assert cli.execute("bench", ["--suite", suite, "--device", "cpu"]) == 5
    assert f"--suite {suite}: its sizes are for a GPU" in capsys.readouterr().err
