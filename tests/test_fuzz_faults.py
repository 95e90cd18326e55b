"""Every way in which a kernel can be wrong is told apart, made small, and costs nobody else."""

import contextlib
import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest

from jetfire.core import loaded, registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.fuzz import InProcess, Isolated, fuzz_kernel
from jetfire.fuzz.example import Mode
from jetfire.fuzz.worker import serve
from jetfire.tests import forked

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).parent / "faults" / "fuzzed.py"
OP = registry.get("gelu")
CPU = Device.parse("cpu")


@pytest.fixture(scope="module", autouse=True)
def _loaded(unload_after_all):
    loaded.add([FILE])


def found(name, executor, **options):
    kernel = registry.get_kernel("gelu", name)
    report = fuzz_kernel(OP, kernel, CPU, largest=60, executor=executor, failures=1, **options)
    (failure,) = report.failures
    assert report.examples <= 200
    return failure


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("raises", "raised", "RuntimeError: no such thing"),
        ("wrong", "wrong", "scale"),
        ("beyond", "guard", "1 bytes written outside"),
        pytest.param(
            *("reads_beyond", "bounds", "1 bytes after the nearest one (1×11)"),
            marks=pytest.mark.skipif(not CPU.interpreted, reason="Triton is not interpreted here"),
        ),
        ("changes_input", "input", "x was changed"),
        ("unwritten", "unwritten", "elements, first at"),
        ("random", "nondeterministic", "differ"),
        ("by_config", "config", "Tile(tile="),
    ],
)
def test_each_fault_is_told_apart(name, kind, said):
    failure = found(name, InProcess(CPU), examples=500)
    assert (failure.kind, said in failure.message) == (kind, True), failure
    problem = failure.case.problem
    assert (problem["m"], problem["n"]) == (1, 11)
    assert failure.case.layout == {}


class Knowing(Isolated):
    """Waits a second for a case that is known to hang, and minutes for the others."""

    def run(self, case):
        self._case_s = 1.0 if case.kernel == "hangs" and case.problem["n"] > 10 else 300.0
        return super().run(case)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("aborts", "crash", "about to end"), ("hangs", "timeout", "no answer in 1 s")],
)
def test_a_worker_that_ends_or_hangs_is_the_case_s(name, kind, said, monkeypatch):
    forked.fork_workers(monkeypatch)
    monkeypatch.setattr("jetfire.fuzz.search.SHRINK_S", 0.0)  # every failure starts a worker
    with contextlib.closing(Knowing(CPU)) as executor:
        failure = found(name, executor, examples=100)
        assert (failure.kind, said in failure.message) == (kind, True), failure
        assert failure.case.problem["n"] > 10
        right = dataclasses.replace(failure.case, kernel="torch", config={}, other=None)
        assert executor.run(right).kind is None


def test_files_that_are_no_kernels(tmp_path, monkeypatch):
    file = tmp_path / "none.py"
    with pytest.raises(UsageError, match="expected a Python file"):
        loaded.add([file])

    def refused(name, text, reason):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv("JETFIRE_LOAD", f"{FILE}{os.pathsep}{tmp_path / name}")
        with pytest.raises(UsageError, match=reason):
            registry.kernels("gelu")

    refused("none.py", "x = 1\n", "expected OP, an Op, or KERNELS")
    refused("broken.py", "1 / 0\n", "ZeroDivisionError")
    refused("again.py", FILE.read_text(), "has a kernel 'aborts' already")


def test_a_worker_says_that_its_device_is_unusable(monkeypatch):
    monkeypatch.setattr("jetfire.core.device.Device.works", lambda device: False)
    ours, theirs = multiprocessing.Pipe()
    serve(theirs, CPU, Mode())
    assert ours.recv() == f"{CPU.label} is unusable"
