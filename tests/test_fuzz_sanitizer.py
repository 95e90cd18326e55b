"""The worker runs under compute-sanitizer, here one that finds what a kernel tells it to."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetfire.cli import execute
from jetfire.core import loaded, registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import NoDeviceError, UsageError
from jetfire.core.sanitizer import INSTRUMENTATION, under_consan
from jetfire.fuzz import (
    Example,
    InProcess,
    Isolated,
    Outcome,
    command,
    fuzz_kernel,
    jobs,
    sanitize,
)
from jetfire.fuzz.draw import FuzzExtent
from jetfire.fuzz.example import Mode
from jetfire.fuzz.run import run_case
from jetfire.tests import forked

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTS = Path(__file__).parent / "faults" / "fuzzed.py"
CPU = Device.parse("cpu")
SCRIPT = """\
    #!/bin/sh
    echo "$@" > {arguments}
    while [ $# -gt 0 ]; do
      case $1 in
        --log-file) shift; export FAKE_LOG=$1;;
        --*) shift;;
        *) break;;
      esac
      shift
    done
    echo "========= COMPUTE-SANITIZER" > $FAKE_LOG
    "$@"
    exit $?
    """
KERNELS = """
import os, pathlib, threading, time
from jetfire.core import registry
from jetfire.core.kernel import Kernel

RIGHT = registry.get_kernel("transpose", "torch")

class Odd(Kernel):
    op, name, Config = "transpose", "odd", RIGHT.Config
    legal, default, space = RIGHT.legal, RIGHT.default, RIGHT.space

    def launch(self, problem, config, inputs, outputs):
        RIGHT.launch(problem, config, inputs, outputs)
        if "FAKE_PIDS" in os.environ:
            with open(os.environ["FAKE_PIDS"], "a") as pids:
                pids.write(f"{os.getpid()} {os.getppid()}\\n")
            time.sleep(1000)
        if problem.n == 19:
            threading.Thread(target=self.report_late).start()
        elif problem.n % 2:
            self.report()

    def report_late(self):
        late = pathlib.Path(os.environ["FAKE_LATE"])
        while not late.exists():
            time.sleep(0.01)
        self.report()
        late.with_suffix(".said").touch()

    def report(self):
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write("========= Invalid __global__ read of size 1 bytes\\n")
            log.write("=========     at odd+0x40 in odd.cu:3\\n=========\\n")

KERNELS = (Odd(),)
"""


ASSERTING = """
import os, sys
from jetfire.core import registry
from jetfire.core.kernel import Kernel

RIGHT = registry.get_kernel("transpose", "torch")
SAID = "/my file.py:{}: unknown: block: [0,0,0], thread: [{},0,0] Assertion `{}` failed."

class Asserting(Kernel):
    op, name, Config, backend = "transpose", "asserting", RIGHT.Config, "triton"
    legal, default, space = RIGHT.legal, RIGHT.default, RIGHT.space

    def launch(self, problem, config, inputs, outputs):
        RIGHT.launch(problem, config, inputs, outputs)
        if problem.n % 2:
            for thread in range(8):
                print(SAID.format(3, thread, "Buffer is written. "), file=sys.stderr)
            print(SAID.format(9, 0, "Deadlock detected"), file=sys.stderr, flush=True)
            os._exit(1)

KERNELS = (Asserting(),)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compute-sanitizer that runs its command; the arguments that it was given."""
    script = tmp_path / "bin" / "compute-sanitizer"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SCRIPT).format(arguments=tmp_path / "arguments"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return tmp_path / "arguments"


def case(n, kernel="odd"):
    problem = registry.get("transpose").Problem(5, n)
    return Example("transpose", kernel, problem.as_dict(), {}, layout={"q": (3, 1)})


@pytest.fixture
def file(tmp_path):
    """A file that is named: workers run it."""
    file = tmp_path / "odd.py"
    file.write_text(KERNELS)
    loaded.add([file])
    return file


def test_what_it_says_is_the_case_s(fake, file):
    with contextlib.closing(Isolated(CPU, sanitizer="memcheck")) as executor:
        assert executor.run(case(8)).kind is None
        found = executor.run(case(9))
        assert found.kind == "sanitizer"
        assert found.message == (
            "Invalid __global__ read of size 1 bytes · at odd+0x40 in odd.cu:3"
        )
        assert executor.run(case(10)).kind is None
    assert fake.read_text().startswith("--tool memcheck --log-file ")


def test_what_it_says_late_is_of_the_case_before(fake, file, tmp_path, monkeypatch):
    late, said = tmp_path / "late", tmp_path / "late.said"
    monkeypatch.setenv("FAKE_LATE", str(late))
    with contextlib.closing(Isolated(CPU, sanitizer="memcheck")) as executor:
        assert executor.run(case(8)).kind is None
        assert executor.late() is None
        assert executor.run(case(19)).kind is None
        late.touch()
        until(said.exists)
        found = executor.late()
        assert (found.kind, found.case) == ("sanitizer", case(19))
        late.unlink()
        said.unlink()
        assert executor.run(case(19)).kind is None
        late.touch()
        until(said.exists)
        found = executor.run(case(10))
        assert (found.kind, found.case) == ("sanitizer", case(19))


class _Late(InProcess):
    """Hears of the third of its cases only when asked again."""

    def run(self, case):
        self.cases = [*getattr(self, "cases", []), case]
        return Outcome()

    def late(self):
        return Outcome("sanitizer", "late", case=self.cases[2])


def test_what_it_says_after_a_batch_is_a_failure():
    kernel, late = registry.get_kernel("transpose", "torch"), _Late(CPU)
    report = fuzz_kernel(registry.get("transpose"), kernel, CPU, examples=5, executor=late)
    (failure,) = report.failures
    assert (failure.case, failure.kind, failure.message) == (late.cases[2], "sanitizer", "late")


@pytest.fixture
def hanging(fake, tmp_path, monkeypatch):
    """Kernels hang; the temporary folder of what is started, and the processes around them."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))

    def pids():
        until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
        return [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    return tmp_path / "tmp", pids


def until(true):
    """Wait for it; a test that hangs ends after some minutes."""
    end = time.monotonic() + 300.0
    while not true():
        assert time.monotonic() < end, "hangs"
        time.sleep(0.05)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_runs_a_worker_ends_with_it(hanging, file):
    folder, pids = hanging
    with contextlib.closing(Isolated(CPU, 1.0, "memcheck")) as executor:
        assert executor.run(case(8)).kind == "timeout"
    until(lambda: all(map(gone, pids())))
    assert list(folder.iterdir()) == []


START = """
import sys
from pathlib import Path
from jetfire.fuzz import Example, Isolated
from jetfire.core import schema
from jetfire.core.device import Device

if __name__ == "__main__":
    executor = Isolated(Device.parse("cpu"), sanitizer="memcheck")
    executor.run(schema.decode(sys.argv[1].encode(), Example, Path("case")))
"""


def test_what_runs_a_worker_ends_with_whoever_started_it(hanging, file, tmp_path):
    (tmp_path / "start.py").write_text(START)
    words = [sys.executable, str(tmp_path / "start.py"), case(8).as_json()]
    starter, (_, pids) = subprocess.Popen(words), hanging
    found = pids()
    assert not any(map(gone, found))
    starter.kill()
    starter.wait()
    until(lambda: all(map(gone, found)))


def test_jobs_that_must_be_killed_leave_nothing(hanging, file):
    folder, pids = hanging
    pairs = [("transpose", "torch"), ("transpose", "odd")]
    extents = dict.fromkeys(pairs, FuzzExtent(5, 40))
    plan = jobs.FuzzPlan(extents, [CPU], 0, jobs=2, sanitizer="memcheck")
    reports = jobs.run(plan, jobs.FuzzResults(plan))
    assert any(report.kernel == "torch" for report in reports)
    found = pids()
    assert list(folder.iterdir())
    reports.close()
    until(lambda: all(map(gone, found)))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("tool", sanitize.TOOLS)
@pytest.mark.parametrize("op", ["adamw", "gemm", "gather_rows"])
def test_a_right_kernel_is_right_in_every_tool_s_mode(op, tool):
    op = registry.get(op)
    problem = op.Problem.parse(op.fitted(dict.fromkeys(op.dims, 34)))
    (kernel, *_) = registry.kernels(op.name).values()
    config = kernel.default(problem, CPU).as_dict()
    for offset in (0, 3):
        made = Example(op.name, kernel.name, problem.as_dict(), config, offset=offset)
        assert run_case(made, CPU, sanitize.mode(tool)).kind is None


@pytest.mark.parametrize(("tool", "kind"), [("memcheck", "wrong"), ("initcheck", None)])
def test_results_are_checked_where_outputs_are_filled(tool, kind, unload):
    problem = registry.get("gelu").Problem(2, 11)
    loaded.add([FAULTS])
    made = Example("gelu", "wrong", problem.as_dict(), {})
    assert run_case(made, CPU, sanitize.mode(tool)).kind == kind


def test_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sanitize, "PROGRAM", "no-such-sanitizer")
    with pytest.raises(NoDeviceError, match="no no-such-sanitizer on PATH or in CUDA_HOME/bin"):
        sanitize.find()
    with pytest.raises(UsageError, match="expected memcheck or racecheck"):
        sanitize.parse("valgrind")


READ = "Error: Race reported between Read access at Multiplier::read_factors(int) in wgmma.cu:394"
SCALE = "and Write access at scale(const Arguments &, int)+0xc550 in wgmma.cu:303 [56 hazards]"
LOAD = "and Write access at load_tile(int)+0x30 in wgmma.cu:120 [5 hazards]"


@pytest.mark.parametrize(
    ("said", "left", "known"),
    [
        ([READ, SCALE], [], 1),
        ([READ, SCALE, SCALE], [], 1),
        ([READ, LOAD, SCALE], [READ, LOAD, SCALE], 0),
        ([READ, SCALE, LOAD], [READ, SCALE, LOAD], 0),
        ([READ], [READ], 0),
        ([READ, SCALE, "Warning: odd"], ["Warning: odd"], 1),
        (
            [READ, SCALE, "Internal Sanitizer Error: no memory"],
            ["Internal Sanitizer Error: no memory"],
            1,
        ),
        (["Error: odd", READ, SCALE, "Error: too"], ["Error: odd", "Error: too"], 1),
        (["odd", READ, SCALE], ["odd"], 1),
    ],
)
def test_a_known_report_is_known_in_all_its_accesses(said, left, known):
    found, count = sanitize.sift("racecheck", "gemm", "wgmma", " · ".join(said))
    assert (found, count) == (" · ".join(left), known)


def test_nothing_is_filled_for_initcheck():
    assert not sanitize.mode("initcheck").initialised
    assert sanitize.mode("racecheck") == Mode(host=True)
    assert sanitize.mode("memcheck").guard == 0


@pytest.fixture
def asserting(tmp_path, monkeypatch, unload):
    """A file with a kernel that ends its process as a device's assertions do."""
    for name in (INSTRUMENTATION, "TRITON_CACHE_DIR"):  # which consan sets, here to be undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    forked.fork_workers(monkeypatch)
    file = tmp_path / "asserting.py"
    file.write_text(ASSERTING)
    loaded.add([file])
    return file


FOUND = "Buffer is written. · at /my file.py:3 · Deadlock detected · at /my file.py:9"


def test_an_assertion_under_consan_is_the_case_s(asserting):
    with contextlib.closing(Isolated(CPU, sanitizer="consan")) as executor:
        assert executor.run(case(8, "asserting")).kind is None
        found = executor.run(case(9, "asserting"))
        assert (found.kind, found.message) == ("sanitizer", FOUND)
        assert executor.run(case(10, "asserting")).kind is None
        assert executor.late() is None


def test_the_command_under_consan(asserting, monkeypatch, tmp_path, capsys):
    """On the CPU, which stands in for a GPU: kernels that are not Triton's are skipped."""
    monkeypatch.setenv("JETFIRE_FUZZ", str(tmp_path / "failures"))
    monkeypatch.setattr("jetfire.fuzz.search.SHRINK_S", 0.0)
    monkeypatch.setattr("jetfire.fuzz.command._tool", lambda name, device: sanitize.parse(name))
    words = ["transpose", "--kernel", "torch,asserting", "--sanitizer", "consan", "--device", "cpu"]
    assert execute("fuzz", [*words, "--examples", "8", "--largest", "20"]) == 3
    out, err = capsys.readouterr()
    assert f"transpose asserting: sanitizer: {FOUND}; jetfire-fuzz --reproduce transpose-" in out
    assert " --sanitizer consan" in out
    alone = "--sanitizer consan: sees kernels in Triton or Gluon alone; skipped: transpose torch"
    assert alone in err
    assert execute("fuzz", ["gemm", "--kernel", "wgmma", "--sanitizer", "consan"]) == 2
    said = "--sanitizer consan: expected kernels in Triton or Gluon alone, not gemm wgmma"
    assert said in capsys.readouterr().err


def test_what_consan_sets(asserting, monkeypatch, tmp_path):
    """And a Triton without it is told of in a line, as a compute-sanitizer that is missing."""
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    gpu = target_device((9, 0))
    assert command._tool("consan", gpu) == "consan"
    assert under_consan()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "consan")
    gemm = registry.get_kernel("gemm", "gluon")
    legal = [
        block
        for block in (32, 64, 128)
        for problem in [registry.get("gemm").Problem(256, 256, 256, block=block)]
        if gemm.legal(problem, gemm.default(problem, gpu), gpu) is None
    ]
    assert legal == [128]
    monkeypatch.setattr("triton._C.libtriton.passes", SimpleNamespace(ttgpuir=None))
    with pytest.raises(NoDeviceError, match=r"^--sanitizer consan: Triton [0-9.]+ has none$"):
        command._tool("consan", gpu)
    with pytest.raises(NoDeviceError, match="--sanitizer consan: needs a CUDA device"):
        command._tool("consan", CPU)
