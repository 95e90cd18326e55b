"""`jetfire-fuzz`: what it prints, saves and exits with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jetfire import ops
from jetfire.cli import execute
from jetfire.fuzz import Case, Failure, InProcess, Isolated, fuzz_kernel, load, store
from jetfire.fuzz.case import Outcome
from jetfire.ops.device import Device

FILE = Path(__file__).parent / "faults" / "fuzzed.py"
CPU = Device.parse("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where failures are kept; kernels that a command loads are gone after it."""
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "fuzz"))
    yield tmp_path / "fuzz"
    unload()


@pytest.fixture
def here(monkeypatch):
    """Cases run in this process."""
    monkeypatch.setattr("jetfire.fuzz.jobs.Plan.executor", lambda _, device: InProcess(device))


def unload():
    load.cache_clear()
    for name in [name for name in ops.kernels("gelu") if name not in ("torch", "triton")]:
        ops.kernels("gelu").pop(name)


def fuzz(*words):
    return execute("fuzz", [*words, "--device", "cpu"])


def test_a_run_of_two_jobs(folder, tmp_path, capsys):
    words = ["gelu", "--load", str(FILE), "--kernel", "unwritten", "--kernel", "torch",
             "--examples", "60", "--largest", "60", "--seed", "5", "--jobs", "2"]  # fmt: skip
    assert fuzz(*words, "--format", "json", "-o", str(tmp_path / "out.json")) == 3
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "out.json").read_text())
    assert (summary["schema"], summary["seed"], summary["jobs"]) == (1, 5, 2)
    torch, unwritten = summary["pairs"]
    (failure,) = unwritten["failures"]
    assert failure["kind"] == "unwritten"
    assert torch["failures"] == []
    alone = fuzz_kernel(ops.get("gelu"), ops.get_kernel("gelu", "torch"), CPU, examples=60,
                        seed=5, largest=60)  # fmt: skip
    assert torch["examples"] == alone.examples == 60
    assert torch["coverage"] == dict(alone.coverage)
    line = next(line for line in err.splitlines() if "unwritten" in line)
    assert line.endswith(f"; jetfire-fuzz --reproduce {failure['id']}" + interpreter())

    unload()
    assert fuzz("--reproduce", failure["id"]) == 3
    assert f"{failure['id']}: unwritten: " in capsys.readouterr().err
    found = store.find(str(folder / f"{failure['id']}.json"))
    assert found == store.find(failure["id"])
    assert (found.case.as_dict(), found.loaded) == (failure["case"], (FILE,))


def interpreter():
    return " --interpreter" if CPU.interpreted else ""


def test_a_table(here, capsys):
    assert fuzz("transpose", "--kernel", "torch", "--examples", "25", "--largest", "40") == 0
    out, err = capsys.readouterr()
    heads, row = (line.split() for line in out.splitlines() if "trans" in line or "ragged" in line)
    assert dict(zip(heads, row, strict=True))["examples"] == "25"
    assert row[:2] == ["transpose", "torch"]
    assert row[-1] == "ok"
    assert "seed 0" in err


def test_a_saved_case_that_is_right_by_now(capsys):
    problem = ops.get("transpose").Problem(3, 5)
    case = Case("transpose", "torch", problem.as_dict(), {})
    store.save(Failure(case, "was wrong\nonce", "wrong"), CPU, ())
    assert fuzz("--reproduce", case.id) == 0
    assert capsys.readouterr().out == f"ok on {CPU.label} (it was wrong: was wrong)\n"


def test_what_differs_from_run_to_run_is_run_more_often(monkeypatch, capsys):
    problem = ops.get("transpose").Problem(3, 5)
    case = Case("transpose", "torch", problem.as_dict(), {})
    store.save(Failure(case, "q: 1 of 2 differ", "nondeterministic"), CPU, ())
    outcomes = [Outcome()] * 6 + [Outcome("nondeterministic", "differs")]

    monkeypatch.setattr(Isolated, "run", lambda self, case: outcomes.pop(0))
    assert fuzz("--reproduce", case.id) == 3
    assert f"{case.id}: nondeterministic after 7 runs: differs" in capsys.readouterr().err
    monkeypatch.setattr(Isolated, "run", lambda self, case: Outcome())
    assert fuzz("--reproduce", case.id) == 0
    assert "after 50 runs (it was nondeterministic" in capsys.readouterr().out


def test_another_kernel_s_outputs_are_compared(here, tmp_path):
    words = ["gelu", "--load", str(FILE), "--kernel", "torch", "--largest", "40"]
    assert fuzz(*words, "--against", "wrong", "--examples", "25", "-o", str(tmp_path / "o")) == 3
    (pair,) = json.loads((tmp_path / "o").read_text())["pairs"]
    assert pair["failures"][0]["kind"] == "kernel"
    assert pair["failures"][0]["case"]["other"]["kernel"] == "wrong"
    assert fuzz(*words, "--against", "random", "--examples", "25", "-o", str(tmp_path / "o")) == 0
    (pair,) = json.loads((tmp_path / "o").read_text())["pairs"]
    assert 0 < pair["differing"] < 100
    assert pair["compared"] > 1000


def test_the_budget_ends_it(here, capsys):
    assert fuzz("gemm", "--kernel", "int_mm", "--examples", "100000", "--budget", "2s") == 0
    err = capsys.readouterr().err
    assert "the budget ended it" in err


def test_an_interrupted_run_sums_up_what_it_did(tmp_path):
    words = ["gelu", "--load", str(FILE), "--kernel", "torch", "--kernel", "wrong", "--examples",
             "100000", "--largest", "40", "--device", "cpu", "-o", str(tmp_path / "o")]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "jetfire.cli", "fuzz", *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert "gelu wrong: wrong: " in child.stdout.readline()
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    torch, _ = json.loads((tmp_path / "o").read_text())["pairs"]
    assert torch["examples"] >= 25
    assert f" {torch['examples']} " in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nope"], 2, "no op 'nope'"),
        (["gelu", "--kernel", "nope"], 2, "no kernel 'nope' in these ops"),
        (["gelu", "--against", "torch", "--kernel", "torch"], 2, "expected an op with another"),
        (["gelu", "--examples", "0"], 2, "--examples 0: expected at least 1"),
        (["gelu", "--format", "csv"], 2, "--format csv: expected table or json"),
        (["gelu", "--reproduce", "gelu-torch-00000000"], 2, "No such file"),
        (["gelu", "--reproduce", str(FILE.with_suffix(".json"))], 2, "No such file"),
        (["gelu", "--sanitizer", "valgrind"], 2, "expected memcheck or racecheck"),
        (["gelu", "--sanitizer", "memcheck"], 5, "needs a CUDA device"),
        (["gemm", "--kernel", "wgmma"], 2, "none of these kernels runs on"),
    ],
)  # fmt: skip
def test_bad_requests(words, code, said, capsys):
    assert fuzz(*words) == code
    assert said in capsys.readouterr().err
