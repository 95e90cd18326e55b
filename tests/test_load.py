"""What makes figures doubtful: others on the device, wide spreads, and peaks that are exceeded."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jetfire.cli import execute
from jetfire.core.device import Device
from jetfire.measure import load, peaks
from jetfire.measure.load import Load, doubts
from jetfire.measure.results import Row
from jetfire.measure.runner import Runner

CPU = Device("cpu", name="a CPU", sms=4)
GPU = Device("cuda", name="a GPU")
READY = "print('ready', flush=True); input()"
PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}


def row(p20=1.0, p80=1.1, **fields) -> Row:
    return Row(
        "gemm",
        "int_mm",
        "kernel",
        {"m": 8, "n": 8, "k": 8, "block": 32},
        ok=True,
        ms=p20,
        ms_p20=p20,
        ms_p80=p80,
        **fields,
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine's clocks: seconds that its cores and this process have worked, and passed."""
    now = SimpleNamespace(worked=100.0, own=3.0, passed=400.0, average=0.0)
    monkeypatch.setattr(load, "_seconds", lambda: (now.worked, now.passed))
    monkeypatch.setattr(load, "_own_seconds", lambda: now.own)
    monkeypatch.setattr(os, "getloadavg", lambda: (now.average, 0.0, 0.0))
    return now


@pytest.mark.parametrize(
    ("own", "others", "text"),
    [
        (20.0, 0.0, None),  # all of what ran was this process
        (20.0, 3.0, None),
        (20.0, 10.0, "other processes used 25% of the CPU"),
        (0.0, 40.0, "other processes used 100% of the CPU"),
        (20.0, -1.0, None),  # clocks tick apart
    ],
)
def test_a_cpu_is_busy_by_what_others_do_with_it(own, others, text, machine):
    watch = Load(CPU)
    machine.own += own
    machine.worked += own + others
    machine.passed += 40.0  # 10 s on 4 cores
    assert watch.text() == text


def test_a_load_average_stands_in_where_there_are_no_clocks(machine, monkeypatch):
    monkeypatch.setattr(load, "_seconds", lambda: None)
    for average, text in ((2.0, None), (2.1, "the load was 2.1 on 4 cores")):
        machine.average = average
        assert Load(CPU).text() == text
        assert Load(CPU).was_quiet == (text is None)
    monkeypatch.setattr(load, "_seconds", lambda: (0.0, 0.0))  # a sandbox that hides them
    assert Load(CPU).text() == "the load was 2.1 on 4 cores"


def test_clocks_are_read_of_the_cores_that_are_ours(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    tick = os.sysconf("SC_CLK_TCK")
    times = " ".join(str(tick * seconds) for seconds in (1, 2, 3, 4, 5, 6, 7, 8, 100, 100))
    stat.write_text(
        f"cpu  {times}\ncpu0 9 9 9 9 9 9 9 9 9 9\ncpu1 {times}\nintr 1\n\ncpu11 {times}"
    )
    monkeypatch.setattr(load, "open", lambda _: stat.open(), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert load._seconds() == (27.0, 36.0)  # 4 and 5 idle; guests are in the first two
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 11})
    assert load._seconds() == (54.0, 72.0)


def test_a_system_without_such_clocks_has_none(monkeypatch):
    def missing(_):
        raise FileNotFoundError

    monkeypatch.setattr(load, "open", missing, raising=False)
    assert load._seconds() is None


def test_own_work_counts_children_that_have_ended():
    before = load._own_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert load._own_seconds() > before


def test_own_work_counts_descendants_that_live():
    """torch.compile's pool is a child's children, which nobody waits for."""
    work = f"sum(range(6_000_000)); {READY}"
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}]).wait()"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        before = os.times()
        assert child.stdout.readline() == b"ready\n"
        lived = load._own_seconds() - time.process_time()
        assert lived > before.children_user + before.children_system + 0.05
        child.stdin.close()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, None), (0.1, None), (0.55, "the GPU was 55% busy beforehand"), (None, None)],
)
def test_a_gpu_is_busy_by_what_ran_beforehand(share, text, monkeypatch):
    monitor = SimpleNamespace(driver=str, utilisation=lambda: share)
    monkeypatch.setattr(load.Nvml, "open", lambda _: monitor)
    watch = Load(GPU)
    monitor.utilisation = lambda: 1.0
    assert watch.text() == text  # not by what this process does with it


def test_a_gpu_without_nvml_is_taken_for_quiet(monkeypatch):
    monkeypatch.setattr(load.Nvml, "open", lambda _: None)
    assert Load(GPU).text() is None
    assert Load(GPU).was_quiet


def test_nothing_is_doubtful_of_quiet_rows():
    assert doubts([row(), row(1.0, 1.25), row(roofline=1.02)], None, PEAKS) is None
    assert doubts([Row("gemm", "x", "peer", {})], None, {}) is None


@pytest.mark.parametrize(
    ("rows", "busy", "known", "says"),
    [
        ([row()], "others did", PEAKS, "doubtful figures: others did"),
        (
            [row()],
            None,
            {**PEAKS, "busy": "others did"},
            "doubtful figures: when its peaks were measured others did",
        ),
        (
            [row(), row(1.0, 1.26), row(2.0, 5.0)],
            None,
            PEAKS,
            "doubtful figures: 2 of 3 rows vary by more than 1.25× from p20 to p80, "
            "gemm int_mm 8×8×8 by 2.50×",
        ),
        (
            [row(roofline=0.9), row(roofline=1.12), row(roofline=1.03)],
            None,
            PEAKS,
            "doubtful figures: gemm int_mm 8×8×8 is at 112% of the roofline, whose peaks were "
            "measured too low: --remeasure-peaks where nothing else runs",
        ),
    ],
)
def test_what_is_doubtful_is_said(rows, busy, known, says):
    assert doubts(rows, busy, known) == says


@pytest.fixture
def bench(monkeypatch, capsys):
    """The stderr of a bench whose rows are given."""
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)

    def run(rows, busy):
        def measure(_, case, options):
            return [replace(row, problem=case.problem.as_dict()) for row in rows]

        monkeypatch.setattr(Runner, "measure", measure)
        monkeypatch.setattr(Load, "text", lambda _: busy)
        words = ["gemm", "--m", "8,16,32", "--block", "32", "--device", "cpu", "--kernel", "int_mm"]
        assert execute("bench", words) == 0
        return capsys.readouterr().err

    return run


def test_a_run_is_doubted_in_one_line(bench):
    said = bench([row(1.0, 3.0, roofline=1.5)], "others did").splitlines()
    (line,) = [text for text in said if "doubtful" in text]
    assert line == said[-1]
    assert line.startswith("jetfire: doubtful figures: others did; 3 of 3 rows vary by more than")
    assert "is at 150% of the roofline" in line


def test_a_device_is_watched_from_before_its_peaks_are_measured(bench, monkeypatch):
    order = []
    begin = Load.__init__
    monkeypatch.setattr(Load, "__init__", lambda *a: (order.append("load"), begin(*a))[1] or None)
    monkeypatch.setattr(peaks, "cached", lambda *_: (order.append("peaks"), PEAKS)[1])
    bench([row()], None)
    assert order == ["load", "peaks"]


def test_a_quiet_run_is_not(bench):
    assert "doubtful" not in bench([row()], None)
