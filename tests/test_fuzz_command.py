"""`jetfire-fuzz`: what it prints, saves and exits with."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError
from jetfire.fuzz import (
    Example,
    Failure,
    InProcess,
    Isolated,
    command,
    fuzz_kernel,
    jobs,
    search,
    store,
)
from jetfire.fuzz.draw import FuzzExtent
from jetfire.fuzz.example import Other, Outcome
from jetfire.tests import forked

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).parent / "faults" / "fuzzed.py"
CPU = Device.parse("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, unload):
    """Where failures are kept; kernels that a command loads are gone after it."""
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "fuzz"))
    forked.fork_workers(monkeypatch)
    return tmp_path / "fuzz"


@pytest.fixture
def here(monkeypatch):
    """Cases run in this process."""
    monkeypatch.setattr("jetfire.fuzz.jobs.FuzzPlan.executor", lambda _, device: InProcess(device))


def fuzz(*words):
    return execute("fuzz", [*words, "--device", "cpu"])


def test_no_more_jobs_are_started_than_have_work(monkeypatch, capsys):
    started = []

    def worker(*args, **options):
        started.append(args)
        return original(*args, **options)

    original = jobs.Worker
    monkeypatch.setattr(jobs, "Worker", worker)
    assert fuzz("gelu", "--kernel", "torch", "--examples", "5", "--jobs", "40") == 0
    assert len(started) == 1  # five examples are one batch


def test_a_run_of_two_jobs(folder, tmp_path, capsys, unload):
    words = [
        "gelu",
        "--load",
        str(FILE),
        "--kernel",
        "unwritten",
        "--kernel",
        "torch",
        "--examples",
        "30",
        "--largest",
        "60",
        "--seed",
        "9",
        "--jobs",
        "2",
    ]
    assert fuzz(*words, "--format", "json", "-o", str(tmp_path / "out.json")) == 3
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary == json.loads((tmp_path / "out.json").read_text())
    assert (summary["schema"], summary["seed"], summary["jobs"]) == (1, 9, 2)
    torch, unwritten = summary["pairs"]
    (failure,) = unwritten["failures"]
    assert failure["kind"] == "unwritten"
    assert torch["failures"] == []
    op, kernel = registry.get("gelu"), registry.get_kernel("gelu", "torch")
    alone = fuzz_kernel(op, kernel, CPU, examples=30, seed=9, largest=60)
    assert torch["examples"] == alone.examples == 30
    assert torch["coverage"] == dict(alone.coverage)
    line = next(line for line in err.splitlines() if "unwritten" in line)
    assert line.endswith(f"; jetfire-fuzz --reproduce {failure['id']}" + interpreter())

    unload()
    assert fuzz("--reproduce", failure["id"]) == 3
    assert f"{failure['id']}: unwritten: " in capsys.readouterr().err
    found = store.find(failure["id"])
    path = store.find(str(folder / f"{failure['id']}.json"))
    assert (found.case.as_dict(), found.load, found.own) == (failure["case"], [str(FILE)], True)
    assert (path.case, path.load, path.own) == (found.case, found.load, False)


def interpreter():
    return " --interpreter" if CPU.interpreted else " --device cpu"


def test_a_table(here, capsys):
    assert fuzz("transpose", "--kernel", "torch", "--examples", "25", "--largest", "40") == 0
    out, err = capsys.readouterr()
    heads, row = (line.split() for line in out.splitlines() if "trans" in line or "ragged" in line)
    assert dict(zip(heads, row, strict=True))["examples"] == "25"
    assert row[:2] == ["transpose", "torch"]
    assert row[-1] == "ok"
    assert "seed 0" in err


def test_a_saved_case_that_is_right_by_now(capsys):
    problem = registry.get("transpose").Problem(3, 5)
    case = Example("transpose", "torch", problem.as_dict(), {})
    store.save(Failure(case, "was gone\nonce", "crash"), CPU)
    assert fuzz("--reproduce", case.id) == 0
    assert capsys.readouterr().out == f"ok on {CPU.label} (it was crash: was gone)\n"


@pytest.mark.parametrize("kind", ["nondeterministic", "wrong", "sanitizer"])
def test_what_may_be_a_race_is_run_more_often(kind, monkeypatch, capsys):
    problem = registry.get("transpose").Problem(3, 5)
    case = Example("transpose", "torch", problem.as_dict(), {})
    store.save(Failure(case, "q: 1 of 2 differ", kind), CPU)
    outcomes = [Outcome()] * 6 + [Outcome(kind, "differs")]

    monkeypatch.setattr(Isolated, "run", lambda self, case: outcomes.pop(0))
    assert fuzz("--reproduce", case.id) == 3
    assert f"{case.id}: {kind} after 7 runs: differs" in capsys.readouterr().err
    monkeypatch.setattr(Isolated, "run", lambda self, case: Outcome())
    assert fuzz("--reproduce", case.id) == 0
    assert f"after 50 runs (it was {kind}" in capsys.readouterr().out


def test_another_kernel_s_outputs_are_compared(here, tmp_path):
    file = tmp_path / "o.json"
    words = ["gelu", "--load", str(FILE), "--kernel", "torch", "--largest", "40"]
    words += ["--examples", "25", "-o", str(file)]
    assert fuzz(*words, "--against", "wrong") == 3
    (pair,) = json.loads(file.read_text())["pairs"]
    assert pair["failures"][0]["kind"] == "kernel"
    assert pair["failures"][0]["case"]["other"]["kernel"] == "wrong"
    assert fuzz(*words, "--against", "random") == 0
    (pair,) = json.loads(file.read_text())["pairs"]
    assert 0 < pair["differing"] < 100
    assert pair["compared"] > 1000


class Clock:
    """Time that passes where cases take it: a second, but for kernels that are said to be slow."""

    def __init__(self, slow=None):
        self.now, self._slow = 1000.0, slow or {}

    def monotonic(self):
        return self.now

    def run(self, case):
        self.now += self._slow.get(case.op, 1.0)
        return Outcome()

    def late(self):
        return None

    def close(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    """Makes a clock that runs the cases; nothing else takes time."""

    def use(slow=None):
        clock = Clock(slow)
        for module in (command, jobs, search):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(jobs.FuzzPlan, "executor", lambda plan, device: clock)
        return clock

    return use


def test_the_budget_ends_it(clock, tmp_path, capsys):
    """Alone it is how long to go on; of examples that were asked for some are missing."""
    clock()
    words = ["gemm", "--kernel", "int_mm", "--budget", "60s", "-o", str(tmp_path / "o.json")]
    assert fuzz(*words) == 0
    assert "the budget ended it" in capsys.readouterr().err
    assert json.loads((tmp_path / "o.json").read_text())["pairs"][0]["examples"] == 60
    assert fuzz(*words, "--examples", "100") == 6
    out, err = capsys.readouterr()
    assert "the budget ended it" in err
    assert "time ended before 1 of 1 kernel had their examples" in err
    assert " 60 of 100 " in out
    assert "out of time" in out
    assert json.loads((tmp_path / "o.json").read_text())["short"] == ["gemm int_mm"]
    assert fuzz(*words, "--examples", "30") == 0


def finished(plan):
    """The results of a plan that has been run."""
    results = jobs.FuzzResults(plan)
    assert all(report.examples for report in jobs.run(plan, results))
    return results


def test_time_is_shared_out(clock):
    """A slow kernel leaves as much to the others as it takes; and says that it had too little."""
    pairs = [("gelu", "torch"), ("transpose", "torch"), ("quantize", "torch")]
    clock = clock({"gelu": 10.0})
    plan = jobs.FuzzPlan(dict.fromkeys(pairs, FuzzExtent(20)), [CPU], 0, deadline=clock.now + 100.0)
    results = finished(plan)
    slow, *others = (results.pairs[pair].examples for pair in pairs)
    assert slow == 4  # begun within its third
    assert others == [20, 20]
    assert results.short() == pairs[:1]
    assert not results.out_of_time


def test_every_kernel_has_its_turn_before_one_has_two(clock):
    pairs = [(name, "torch") for name in ("gelu", "transpose", "quantize", "add", "dropout")]
    clock = clock()
    plan = jobs.FuzzPlan(
        dict.fromkeys(pairs, FuzzExtent(None)), [CPU], 0, deadline=clock.now + 300.0
    )
    results = finished(plan)
    examples = [results.pairs[pair].examples for pair in pairs]
    assert max(examples) - min(examples) <= plan.extents[pairs[0]].batch
    assert (results.out_of_time, results.short()) == (True, [])


def test_a_kernel_without_an_example_is_short_whatever_was_asked_for(clock):
    pairs = [("gelu", "torch"), ("transpose", "torch")]
    clock = clock({"gelu": 100.0})
    plan = jobs.FuzzPlan(
        dict.fromkeys(pairs, FuzzExtent(None)), [CPU], 0, deadline=clock.now + 50.0
    )
    assert finished(plan).short() == pairs[1:]


def test_what_ran_elsewhere_is_said(here, tmp_path, capsys):
    words = ["transpose", "gemm", "--examples", "2", "-o", str(tmp_path / "o.json")]
    assert fuzz(*words) == 0
    summary = json.loads((tmp_path / "o.json").read_text())
    elsewhere = ["gemm wgmma", "gemm mma", "gemm gluon"]
    assert [name for name in summary["elsewhere"] if "triton" not in name] == elsewhere
    count = len(summary["elsewhere"])
    assert f"{count} kernels not run here: " in capsys.readouterr().err


def test_the_seed_is_the_one_that_was_given(here, tmp_path, monkeypatch):
    """Of the command: other seeds draw other examples, the same the same."""
    drawn = []

    def run(self, case):
        drawn[-1].append(case.as_json())
        return Outcome()

    monkeypatch.setattr(InProcess, "run", run)
    for seed in ("7", "7", "8"):
        drawn.append([])
        words = ["transpose", "--kernel", "torch", "--examples", "30", "--seed", seed]
        assert fuzz(*words, "-o", str(tmp_path / "o.json")) == 0
        assert json.loads((tmp_path / "o.json").read_text())["seed"] == int(seed)
    assert len(drawn[0]) == 30
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_an_interrupted_run_sums_up_what_it_did(tmp_path):
    words = [
        "gelu",
        "--load",
        str(FILE),
        "--kernel",
        "torch",
        "--kernel",
        "wrong",
        "--examples",
        "100000",
        "--largest",
        "40",
        "--device",
        "cpu",
        "-o",
        str(tmp_path / "o.json"),
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "jetfire.cli", "fuzz", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "gelu wrong: wrong: " in child.stdout.readline()
    os.killpg(child.pid, signal.SIGINT)
    try:
        out, err = child.communicate(timeout=300)  # or it hangs
    finally:
        child.kill()
    assert child.returncode == 130, err
    summary = json.loads((tmp_path / "o.json").read_text())
    torch, _ = summary["pairs"]
    assert torch["examples"] >= 25
    assert f" {torch['examples']} of 100000 " in out
    assert summary["finished"] is False
    assert "it did not finish" in err


def test_a_kernel_that_an_interrupted_run_did_not_come_to_has_not_run(
    here, tmp_path, monkeypatch, capsys
):
    def run(self, case):
        if case.op == "transpose":
            raise KeyboardInterrupt
        return Outcome()

    monkeypatch.setattr(InProcess, "run", run)
    words = ["gelu", "transpose", "--kernel", "torch", "--examples", "30"]
    assert fuzz(*words, "-o", str(tmp_path / "o.json")) == 130
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " torch " in line]
    assert [(row[0], row[-1]) for row in rows] == [("gelu", "ok"), ("transpose", "run")]
    assert rows[1][-2:] == ["not", "run"]
    summary = json.loads((tmp_path / "o.json").read_text())
    assert [pair["examples"] for pair in summary["pairs"]] == [25, 0]
    assert summary["finished"] is False


SLOW = """
import time
from jetfire.core import registry
from jetfire.core.kernel import Kernel

RIGHT = registry.get_kernel("gelu", "torch")

class Slow(Kernel):
    op, name, Config = "gelu", "slow", RIGHT.Config
    default, space, legal = RIGHT.default, RIGHT.space, RIGHT.legal

    def launch(self, problem, config, inputs, outputs):
        time.sleep(1.0)
        RIGHT.launch(problem, config, inputs, outputs)

KERNELS = (Slow(),)
"""


def test_a_killed_run_leaves_what_its_jobs_had_done_by_then(tmp_path):
    """Within a batch too: the slow kernel's first has 25 examples, and takes a minute."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [
        "gelu",
        "--load",
        str(tmp_path / "slow.py"),
        "--kernel",
        "slow",
        "--kernel",
        "torch",
        "--examples",
        "100000",
        "--largest",
        "40",
        "--device",
        "cpu",
        "--jobs",
        "2",
        "-o",
        str(tmp_path / "o.json"),
    ]
    (tmp_path / "o.json").write_text('{"finished": true}')  # of a run before
    child = forked.Command("fuzz", words, TMPDIR=str(tmp_path))  # its jobs' folder stays
    try:
        end = time.monotonic() + 300
        while not all(examples := counts(tmp_path / "o.json")):
            assert child.runs(), child.said()
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        child.kill()
    _, slow = examples
    assert 0 < slow < 25
    summary = json.loads((tmp_path / "o.json").read_text())
    assert (summary["finished"], summary["out_of_time"]) == (False, False)


def counts(file):
    """The examples of each kernel, as a run's file has them by now."""
    return [pair["examples"] for pair in json.loads(file.read_text()).get("pairs", ())] or [0]


def test_the_record_is_written_now_and_then_and_is_unfinished_until_the_end(
    clock, tmp_path, monkeypatch
):
    clock, records = clock(), []

    def write(path, text):
        assert path == tmp_path / "o.json"
        records.append((clock.now, json.loads(text)))

    monkeypatch.setattr("jetfire.fuzz.command.write", write)
    words = ["gemm", "transpose", "--kernel", "int_mm", "--kernel", "torch", "--examples", "60"]
    assert fuzz(*words, "-o", str(tmp_path / "o.json")) == 0
    *before, (_, last) = records
    times = [now for now, _ in before]
    assert times[0] == 1000.0
    assert all(2.0 <= later - now <= 4.0 for now, later in itertools.pairwise(times))
    done = [sum(pair["examples"] for pair in record["pairs"]) for _, record in records]
    assert (done[0], done[-1]) == (0, 60 * len(last["pairs"]))
    assert done == sorted(done)
    assert [record["finished"] for _, record in records] == [False] * len(before) + [True]


def test_what_is_no_file_has_the_record_once(clock, capfd):
    clock()
    words = ["gemm", "--kernel", "int_mm", "--examples", "60", "-o", "/dev/stdout"]
    assert fuzz(*words) == 0
    out = capfd.readouterr().out
    assert out.count('"schema"') == out.count('"finished": true') == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nope"], 2, "no op 'nope'"),
        (["gelu", "--kernel", "nope"], 2, "no kernel 'nope': expected"),
        (["gelu", "--against", "torch", "--kernel", "torch"], 2, "expected an op with another"),
        (["gelu", "--examples", "0"], 2, "--examples 0: expected at least 1"),
        (["gelu", "--format", "xml"], 2, "--format xml: expected one of table, json"),
        (["gelu", "--reproduce", "gelu-torch-00000000"], 2, "No such file"),
        (["gelu", "--reproduce", str(FILE.with_suffix(".json"))], 2, "No such file"),
        (["gelu", "--sanitizer", "valgrind"], 2, "expected one of memcheck, racecheck"),
        (["gelu", "--sanitizer", "memcheck"], 5, "needs a CUDA device"),
        (["gemm", "--kernel", "wgmma"], 5, "none of these kernels runs on"),
        (["gelu", "-o", "/no/such/folder/o.json"], 2, "cannot be written: No such file"),
        (["gelu", "-o", "/"], 2, "is a folder"),
        (["gelu", "-o", "x.xyz"], 2, "-o x.xyz: expected a file named .json"),
        (["gelu", "-o", "x.csv"], 2, "-o x.csv: expected a file named .json"),
    ],
)
def test_bad_requests(words, code, said, capsys):
    assert fuzz(*words) == code
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def saved_gemm(kernel, other=None):
    """A failure's name, of a kernel at its default on an H200."""
    op, device = registry.get("gemm"), target_device((9, 0))
    problem = op.Problem(128, 128, 128)
    config = registry.get_kernel("gemm", kernel).default(problem, device).as_dict()
    case = Example("gemm", kernel, problem.as_dict(), config, other=other)
    store.save(Failure(case, "was wrong", "wrong"), device)
    return case.id, config


def test_a_case_of_kernels_that_are_not_for_this_device(capsys):
    name, config = saved_gemm("wgmma")
    assert fuzz("--reproduce", name) == 2
    assert f"--reproduce {name}: wgmma on {CPU.label}: " in capsys.readouterr().err
    name, _ = saved_gemm("int_mm", Other("wgmma", config))
    assert fuzz("--reproduce", name) == 2
    assert f"--reproduce {name}: wgmma on {CPU.label}: " in capsys.readouterr().err


def test_a_case_is_of_an_op_that_was_named(capsys):
    name, _ = saved_gemm("wgmma")
    assert fuzz("gelu", "--reproduce", name) == 2
    said = f"jetfire: --reproduce {name}: expected a case of gelu: it is of gemm\n"
    assert capsys.readouterr().err == said
    for named in (["gemm"], ["gelu", "gemm"], ["all"]):
        assert fuzz(*named, "--reproduce", name) == 2
        assert f"--reproduce {name}: wgmma on {CPU.label}: " in capsys.readouterr().err


def save_with(file, case):
    """Save a failure of a kernel of a file that is named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_LOAD", str(file))
        store.save(Failure(case, "was wrong", "wrong"), CPU)


def test_a_given_file_takes_the_place_of_the_saved_one(tmp_path, capsys, unload):
    problem = registry.get("gelu").Problem(3, 11)
    case = Example("gelu", "wrong", problem.as_dict(), {"tile": 1})
    save_with(tmp_path / "gone.py", case)
    assert fuzz("--reproduce", case.id) == 2
    assert "gone.py: expected a Python file" in capsys.readouterr().err
    assert fuzz("--reproduce", case.id, "--load", str(FILE)) == 3
    unload()
    save_with(FILE, case)
    moved = tmp_path / "moved.py"
    moved.write_text(FILE.read_text())
    assert fuzz("--reproduce", case.id, "--load", str(moved)) == 3


def test_what_a_strangers_file_lists_is_not_run(tmp_path, capsys, unload, monkeypatch):
    """Under whatever name: only an ID of one's own folder may load what was saved with it."""
    ran, code = tmp_path / "ran", tmp_path / "code.py"
    code.write_text(f"open({str(ran)!r}, 'w').close()\n" + FILE.read_text())
    problem = registry.get("gelu").Problem(3, 11)
    case = Example("gelu", "wrong", problem.as_dict(), {"tile": 1})
    save_with(code, case)
    given = tmp_path / "given"
    given.mkdir()
    (store.folder() / f"{case.id}.json").rename(given / "it.json")
    for name in (given / "it.json", given / "it", "../given/it", given / "." / "it.json"):
        assert fuzz("--reproduce", str(name)) == 2
        assert not ran.exists()
    assert fuzz("--reproduce", str(given / "it.json")) == 2
    err = capsys.readouterr().err
    assert f"its kernels are those of '{code}', which are not run" in err
    assert "expected --load FILE" in err
    named = tmp_path / "named.py"
    named.write_text(FILE.read_text())
    monkeypatch.setenv("JETFIRE_LOAD", str(named))
    assert fuzz("--reproduce", str(given / "it.json")) == 3
    assert not ran.exists()
    monkeypatch.setenv("JETFIRE_LOAD", "")
    assert fuzz("--reproduce", str(given / "it.json"), "--load", str(code)) == 3
    assert ran.exists()


def test_bad_requests_are_told_before_torch_is_imported(tmp_path):
    """Where torch cannot be imported at all."""
    requests = [
        ["--examples", "0"],
        ["--largest", "0"],
        ["--jobs", "-1"],
        ["nope"],
        ["--format", "xml"],
        ["--budget", "soon"],
        ["--load", str(tmp_path / "none.py")],
        ["--sanitizer", "valgrind"],
        ["-o", str(tmp_path / "none" / "o.json")],
        ["-o", str(tmp_path / "o.xyz")],
        ["--reproduce", "gelu-torch-00000000"],
        ["--reproduce", str(tmp_path / "none.json")],
    ]
    code = (
        "import sys; sys.modules.update(torch=None, triton=None, numpy=None)\n"
        "from jetfire.cli import execute\n"
        f"print([execute('fuzz', words) for words in {requests!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str([2] * len(requests)), done.stderr


def test_nothing_compared_is_said(here, tmp_path, capsys):
    file = tmp_path / "narrow.py"
    file.write_text(NARROW)
    words = ["gelu", "--load", str(file), "--kernel", "torch", "--examples", "10"]
    assert fuzz(*words, "--largest", "40", "--against", "never") == 2
    out, err = capsys.readouterr()
    assert "nothing compared" in out
    assert f"--against never: nothing was compared on {CPU.label}" in err


HUNGRY = """
from jetfire.core import registry
from jetfire.core.kernel import Kernel

RIGHT = registry.get_kernel("gelu", "torch")

class Hungry(Kernel):
    op, name, Config = "gelu", "hungry", RIGHT.Config
    default, space, legal = RIGHT.default, RIGHT.space, RIGHT.legal

    def launch(self, problem, config, inputs, outputs):
        if problem.m > LEAST:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        RIGHT.launch(problem, config, inputs, outputs)

KERNELS = (Hungry(),)
"""


@pytest.mark.parametrize(("least", "code"), [(0, 2), (20, 0)])
def test_a_kernel_whose_every_example_lacks_memory_does_not_pass(
    here, tmp_path, capsys, least, code
):
    file = tmp_path / f"hungry_{least}.py"
    file.write_text(HUNGRY.replace("LEAST", str(least)))
    words = ["gelu", "--load", str(file), "--kernel", "hungry", "--examples", "30"]
    assert fuzz(*words, "--largest", "40") == code
    out, err = capsys.readouterr()
    assert ("nothing checked" in out) == (code == 2)
    assert ("gelu hungry: no example had the memory it needs on " in err) == (code == 2)


NARROW = """
from jetfire.core import registry
from jetfire.core.kernel import Kernel

RIGHT = registry.get_kernel("gelu", "torch")

class Never(Kernel):
    op, name, Config = "gelu", "never", RIGHT.Config
    default, space, launch = RIGHT.default, RIGHT.space, RIGHT.launch

    def legal(self, problem, config, device):
        return "never"

KERNELS = (Never(),)
"""


def test_a_failure_that_cannot_be_saved_is_shown(here, folder, tmp_path, capsys, unload):
    folder.write_text("in the way")
    words = ["gelu", "--load", str(FILE), "--kernel", "wrong", "--kernel", "unwritten"]
    assert fuzz(*words, "--examples", "25", "--largest", "30") == 3
    out, err = capsys.readouterr()
    for name in ("wrong", "unwritten"):
        assert f"gelu {name}: {name}: " in out
    lines = err.splitlines()
    said = [i for i, line in enumerate(lines) if line.startswith(f"jetfire: {folder}")]
    assert len(said) == 2
    assert "cannot be written: " in lines[said[0]]
    file = tmp_path / "failure.json"
    file.write_text(lines[said[0] + 1])
    unload()
    assert fuzz("--reproduce", str(file), "--load", str(FILE)) == 3


def test_a_long_failure_that_cannot_be_saved_is_shown_whole(folder, tmp_path, capsys):
    folder.write_text("in the way")
    config = {f"field_{i}": "v" * 100 for i in range(60)}
    case = Example("transpose", "torch", registry.get("transpose").Problem(3, 5).as_dict(), config)
    store.save(Failure(case, "x\x1b" * 10**5, "wrong"), CPU)
    _, saved = capsys.readouterr().err.splitlines()
    file = tmp_path / "failure.json"
    file.write_text(saved)
    found = store.find(str(file))
    assert (found.case, found.kind, len(found.message)) == (case, "wrong", store.MESSAGE)


def test_a_kernel_that_loaded_files_do_not_bring_is_named_with_the_nearest(here, capsys):
    assert fuzz("gelu", "--load", str(FILE), "--kernel", "wrng") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("jetfire: no kernel 'wrng' (did you mean wrong?): expected one of ")
    assert "unwritten" in said


def test_what_the_system_refuses_a_job_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "file"))
    device, pair, answers = target_device((9, 0)), ("quantize", "triton"), []
    asked = iter([(jobs.Unit(pair, jobs.ALONE),)])
    connection = SimpleNamespace(recv=lambda: next(asked), send=answers.append)
    with pytest.raises(StopIteration):
        jobs.drive(
            connection, jobs.FuzzPlan({pair: FuzzExtent()}, [device], 0), device, str(tmp_path)
        )
    ((_, error, _),) = answers
    assert type(error) is UsageError
    assert str(error) == f"{tmp_path / 'file'}: File exists"


def test_the_table_comes_before_the_file(here, tmp_path, monkeypatch, capsys):
    def full(path, text):
        if json.loads(text)["finished"]:
            raise UsageError("disk full")

    monkeypatch.setattr("jetfire.fuzz.command.write", full)
    words = ["transpose", "--kernel", "torch", "--examples", "2", "--largest", "20"]
    assert fuzz(*words, "-o", str(tmp_path / "o.json")) == 2
    out, err = capsys.readouterr()
    assert "ragged" in out
    assert "disk full" in err


def test_an_error_of_a_job_is_this_command_s(tmp_path, capfd):
    """Its class, exit code and, asked for, its traceback."""
    file = tmp_path / "job.py"
    file.write_text(
        NARROW.replace('return "never"', "raise NoDeviceError('no such part')").replace(
            "from jetfire.core.kernel",
            "from jetfire.core.errors import NoDeviceError\nfrom jetfire.core.kernel",
        )
    )
    words = ["gelu", "--load", str(file), "--kernel", "never", "--jobs", "2", "--examples", "5"]
    assert fuzz(*words, "--debug") == 5
    err = capfd.readouterr().err
    assert "in legal" in err
    assert err.splitlines()[-1] == "jetfire: no such part"


def test_a_huge_example_waits_for_another_until_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path))
    device, pair = target_device((9, 0)), ("quantize", "triton")
    plan = jobs.FuzzPlan({pair: FuzzExtent()}, [device], 0)
    with FileLock(tmp_path / "fuzz-0.lock"):
        unit = jobs.Unit(pair, jobs.ALONE, deadline=time.monotonic() + 0.3)
        (report,) = plan.run(unit, device, None)
    assert (report.kernel, report.examples) == ("triton", 0)
