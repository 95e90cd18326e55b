"""Counters of Nsight Compute: what its CSV says, what is said of it, and what is refused."""

import json
import os
import shutil
import sys
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetfire.cli import execute
from jetfire.core import registry
from jetfire.core.files import Unreadable
from jetfire.measure import ncu, peaks
from jetfire.measure.ncu import Ncu, ProfilingError, number, parse
from jetfire.measure.plan import Case
from jetfire.measure.results import Results, Row
from jetfire.report import counters as shown
from jetfire.report import show
from jetfire.report.documents import BEGIN, END
from jetfire.tests import forked
from jetfire.tests.fakes import ncu as fake
from jetfire.tests.hostile import few

PEAKS = {"copy_gbps": 10.0, "int8_tops": 1.0, "bf16_tflops": 1.0, "how": {}}
ALL = list(fake.VALUES)
QUANTIZE = registry.get("quantize")
CASE = Case(QUANTIZE, QUANTIZE.Problem.parse({"m": 64, "n": 64, "block": 32}))


@cache
def tried(how):
    """What `Ncu.begun` returns, once for each way that the stand-in fares: torch loads for it."""
    assert os.environ.get("FAKE_NCU", "wide") == how
    return Ncu._tried("cpu")


@pytest.fixture
def ncu_on_path(tmp_path, monkeypatch):
    """Put the stand-in on the PATH; what is given to it stands in the file that is returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ncu"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {fake.__file__} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NCU_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(ncu, "check", lambda device: None)
    monkeypatch.setattr(Ncu, "begun", lambda device: tried(os.environ.get("FAKE_NCU", "wide")))
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    return tmp_path / "log"


# What is read.


def test_a_line_of_metrics_for_each_launch():
    text = "==PROF== Connected\nof the program: a line\n" + fake.wide(ALL, 2) + "==PROF== bye\n"
    first, second = parse(text)
    assert first.kernel == fake.KERNELS[0]
    assert first.values["gpu__time_duration.sum"] == 3000
    assert second.values["dram__bytes_write.sum"] == 250_000
    assert not any("tensor" in metric for metric in first.values)  # n/a
    assert set(first.values) == {metric for metric in ALL if "tensor" not in metric}


def test_a_line_for_each_metric_in_scaled_units():
    wide, long = parse(fake.wide(ALL, 2)), parse(fake.long(ALL, 2))
    assert [one.kernel for one in long] == [one.kernel for one in wide]
    for one, other in zip(long, wide, strict=True):
        assert one.values == pytest.approx(other.values)


def test_launches_come_to_one():
    found = ncu.counters(parse(fake.wide(ALL, 2)), 5_000_000)
    assert found["kernels"] == "first, kernel, second_kernel"
    assert found["duration_ms"] == pytest.approx(0.004)
    assert found["dram_read_bytes"] == 3_000_000
    assert found["dram_write_bytes"] == 750_000
    assert found["dram_of_counted"] == pytest.approx(0.75)
    assert found["l2_bytes"] == 6_000_000
    assert found["bank_conflicts"] == 42
    assert found["sm_pct"] == pytest.approx((30.5 * 3 + 10.5) / 4)
    assert found["stall_long_scoreboard"] == pytest.approx((12.5 * 3 + 8.5) / 4)
    assert (found["registers"], found["limit_registers"]) == (32, 8)
    assert "stall_barrier" not in found
    assert "tensor_pct" not in found


def test_what_one_launch_lacks_is_left_out():
    first, second = parse(fake.wide(ALL, 2))
    values = {k: v for k, v in second.values.items() if k not in ("dram__bytes_read.sum",)}
    found = ncu.counters([first, ncu.CountedLaunch("x", values)], 100)
    assert not {"dram_read_bytes", "dram_of_counted"} & found.keys()
    assert found["dram_write_bytes"] == 750_000


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1,234.5", "", 1234.5),
        ("0", "byte", 0.0),
        ("1.5", "Mbyte", 1.5e6),
        ("2", "ms", 2e6),
        ("2", "usecond", 2e3),
        ("3e2", "", 300.0),
        ("12 (3; 9)", "", 12.0),
        *((text, "", None) for text in ("n/a", "", "nan", "inf", "-1", "1e300", "(!) n/a", "x1")),
    ],
)
def test_a_value(text, unit, value):
    assert number(text, unit) == value


HOSTILE = {
    "nothing": "",
    "no CSV": "==ERROR== no kernel\nhello",
    "a head alone": '"ID","Kernel Name","dram__bytes_read.sum"\n',
    "units alone": '"ID","Kernel Name","dram__bytes_read.sum"\n"","","byte"\n',
    "no kernel's name": '"ID","x"\n"0","1"\n',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_csv_without_launches(name):
    assert parse(HOSTILE[name]) == []


def test_csv_that_is_broken():
    with pytest.raises(ProfilingError, match="CSV cannot be read"):
        parse(fake.wide(ALL, 1) + '"' + "x" * 200_000)


def test_short_lines_and_escapes_do_no_harm():
    text = '"ID","Kernel Name","dram__bytes_read.sum"\n"","","byte"\n"0"\n"1","a\x1b[31mb(int)"\n'
    (one,) = parse(text)
    assert one.values == {}
    found = ncu.counters([one], 1)
    assert found == {"kernels": r"a\x1b[31mb(int)"}
    row = Row("quantize", "torch", "kernel", {"m": 8}, ms=1.0, extra={"counters": found})
    assert json.loads(json.dumps(row.as_dict()))["counters"] == found


@few
@given(st.text(alphabet='",\n0a1_.ID=\x00é', max_size=200))
def test_no_text_breaks_the_parser(text):
    for one in ('"ID","Kernel Name","a__b.sum"\n', ""):
        try:
            launches = parse(one + text)
        except ProfilingError:
            continue
        if launches:
            assert isinstance(ncu.counters(launches, 10)["kernels"], str)


def test_metrics_are_those_that_ncu_lists():
    known = {m.partition(".")[0] for m in ALL} - {"gpu__dram_throughput"}
    known |= {"dram__throughput", "smsp__average_warps_issue_stalled_gmma_per_issue_active"}
    known |= {"smsp__average_warps_issue_stalled_gmma_not_issued_per_issue_active"}
    found = ncu.wanted(known)
    assert f"dram__throughput.{fake.PEAK}_elapsed" in found
    assert f"gpu__dram_throughput.{fake.PEAK}_elapsed" not in found
    assert fake.STALLED.format("gmma") in found
    assert not any("not_issued" in metric for metric in found)
    assert "launch__registers_per_thread" in found
    assert set(fake.VALUES) <= set(ncu.wanted(set()))


# ncu is run.


def test_a_kernel_is_counted(ncu_on_path):
    begun = tried("wide")
    assert set(begun.metrics) >= set(ALL)
    found = begun.count(CASE, "torch", {}, 0, "normal")
    assert found["dram_of_counted"] == pytest.approx(2_500_000 / QUANTIZE.bytes(CASE.problem))
    last = json.loads(ncu_on_path.read_text().splitlines()[-1])
    assert last[last.index("--clock-control") + 1] == "none"
    assert last[last.index("--cache-control") + 1] == "all"
    assert last[last.index("--profile-from-start") + 1] == "off"
    assert json.loads(last[-1])["problem"] == CASE.problem.as_dict()


def test_several_launches_of_a_version_of_before(ncu_on_path, monkeypatch):
    monkeypatch.setenv("FAKE_NCU", "long")
    found = Ncu._tried("cpu").count(CASE, "torch", {}, 0, "normal")
    assert found["duration_ms"] == pytest.approx(0.004)


def test_metrics_that_ncu_does_not_know_are_left_out(ncu_on_path, monkeypatch):
    monkeypatch.setenv("FAKE_NCU", "unknown")
    begun = Ncu._tried("cpu")
    assert set(begun.metrics) == set(ALL)
    assert "stall_wait" in begun.count(CASE, "torch", {}, 0, "normal")


@pytest.mark.parametrize(
    ("how", "kernel", "says"),
    [
        ("crash", "torch", "exit code -6"),
        ("forbidden later", "torch", "ERR_NVGPUCTRPERM"),
        ("wide", "no_such", "KeyError: 'no_such'"),
    ],
)
def test_why_a_kernel_has_no_counters(ncu_on_path, monkeypatch, how, kernel, says):
    begun = tried("wide")
    monkeypatch.setenv("FAKE_NCU", how)
    with pytest.raises(ProfilingError, match=says):
        begun.count(CASE, kernel, {}, 0, "normal")


def test_a_kernel_that_takes_too_long(ncu_on_path, monkeypatch):
    begun = tried("wide")
    monkeypatch.setattr(ncu, "TIMEOUT_S", 0.2)
    with pytest.raises(ProfilingError, match=r"more than 0\.2 s"):
        begun.count(CASE, "torch", {}, 0, "normal")


# The commands.

BENCH = ("quantize", "--m", "64", "--block", "32", "--kernel", "torch", "--peer", "none")
BENCH += ("--device", "cpu", "--rounds", "2", "--profile", "ncu")


def test_bench_puts_them_into_row_table_and_file(ncu_on_path, capsys, tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    assert execute("bench", [*BENCH, "-o", str(file)]) == 0
    out = capsys.readouterr().out
    (row,) = Results.load(file).rows
    assert row.extra["counters"]["dram_read_bytes"] == 2_000_000
    assert "counters of" in out
    assert "long_scoreboard" in out
    assert "torch: limited by DRAM, at 88% of the peak" in out
    assert "of counted: DRAM bytes over the fewest" in out
    assert "--profile ncu" in out.splitlines()[-1]
    assert execute("compare", [str(file), str(file)]) == 0
    # The same counters, in other forms.
    monkeypatch.setattr(Ncu, "count", lambda *_: row.extra["counters"])
    assert execute("bench", [*BENCH, "--format", "md"]) == 0
    out = capsys.readouterr().out
    assert "| counters of |" in out
    assert "- 64×64 torch: limited by DRAM" in out.replace("-  torch", "- 64×64 torch")
    assert execute("bench", [*BENCH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["counters"]["kernels"] == "first, kernel"


def test_a_kernel_that_cannot_be_profiled_keeps_its_row(ncu_on_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_NCU", "crash")
    assert execute("bench", [*BENCH, "--json"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert row["ms"] > 0
    assert "counters" not in row
    assert "torch: not profiled: " in err
    assert "exit code -6" in err


def test_what_was_timed_before_ctrl_c_is_kept(ncu_on_path, capsys, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ncu, "count", interrupt)
    assert execute("bench", [*BENCH, "-o", str(tmp_path / "r.json")]) == 130
    assert "interrupted after 1 row, shown and saved" in capsys.readouterr().err
    (row,) = Results.load(tmp_path / "r.json").rows
    assert row.ms
    assert "counters" not in row.extra


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("forbidden", "may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root"),
        ("nothing", "No kernels were profiled. (ncu: exit code 0)"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_counters_nothing_is_timed(ncu_on_path, capsys, monkeypatch, how, says, command):
    monkeypatch.setenv("FAKE_NCU", how)
    words = BENCH if command == "bench" else ("transpose", "--m", "32", *BENCH[-2:])
    assert execute(command, [*words, *(["--device", "cpu"] if command == "tune" else [])]) == 5
    out, err = capsys.readouterr()
    lines = [one for one in err.splitlines() if "no GPU in use" not in one]
    assert (out, len(lines)) == ("", 1)
    assert lines[0].startswith("jetfire: --profile ncu: ")
    assert says in lines[0]


def test_without_ncu(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for command, words in (("bench", ["gemm", "--m", "64"]), ("tune", ["gemm", "--m", "64"])):
        assert execute(command, [*words, "--profile", "ncu"]) == 5
        assert capsys.readouterr().err == (
            "jetfire: --profile ncu: no ncu on the PATH: install Nsight Compute (of the CUDA "
            "toolkit), and put ncu on the PATH\n"
        )


def test_a_cpu_has_no_counters(ncu_on_path, monkeypatch):
    monkeypatch.undo()
    from jetfire.core.device import Device
    from jetfire.core.errors import NoDeviceError

    with pytest.raises(NoDeviceError, match="counters are a GPU's, and this is"):
        Ncu.begun(Device.parse("cpu"))


def test_a_run_for_another_profiler(capsys):
    words = ["quantize,transpose", "--m", "64", "--block", "32", "--kernel", "torch"]
    assert execute("bench", [*words, "--device", "cpu", "--profile-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["op"] for row in rows] == ["quantize", "transpose"]
    assert all(row["ok"] and row["ms"] is None for row in rows)
    assert execute("bench", [*words, "--device", "cpu", "--profile-run"]) == 0
    assert "torch ran once" in capsys.readouterr().out


TUNE = ("transpose", "--kernel", "triton", "--m", "32", "--block", "32", "--device", "cpu")
TUNE += ("--peer", "none", "--trials", "2", "--budget", "60s", "--profile", "ncu")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="tunes on the CPU")
def test_tune_counts_winner_and_default(ncu_on_path, capsys, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path / "studies"))
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "profiles"))
    forked.fork_workers(monkeypatch)
    page = tmp_path / "t.html"
    assert execute("tune", [*TUNE, "--json", "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["counted"]
    assert one["counters"]["dram_read_bytes"] == one["default_counters"]["dram_read_bytes"]
    assert "winner" in one["said"]
    assert len(found["searches"]) == 1
    text = page.read_text()
    assert "Why is it fast" in text
    assert "stalls-data" in text
    # Once more: nothing is searched, and the winner of before is counted.
    monkeypatch.setenv("FAKE_NCU", "idle")
    assert execute("tune", list(TUNE)) == 0
    out, err = capsys.readouterr()
    assert "tuned already" in err
    assert "counters of" in out
    assert one["said"] in out


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="tunes on the CPU")
def test_tune_gives_its_result_where_counters_cannot_be_kept(
    ncu_on_path, capsys, tmp_path, monkeypatch
):
    from jetfire.tuner.study import StorageError, Study

    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path / "studies"))
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "profiles"))
    forked.fork_workers(monkeypatch)
    own = Study.conclude

    def conclude(study, final):
        if "counters" in final:
            raise StorageError("cannot use study s: No space left on device")
        own(study, final)

    monkeypatch.setattr(Study, "conclude", conclude)
    assert execute("tune", [*TUNE, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "jetfire: cannot use study s: No space left on device"
    assert len(json.loads(out)["searches"]) == 1


# What is said.


def changed(**values):
    found = ncu.counters(parse(fake.wide(ALL, 1)), 2_500_000)
    return {**found, "tensor_pct": 0.0, **values}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "limited by DRAM, at 88% of the peak"),
        ({"dram_pct": 40.0}, "limited by memory's pipes, at 90% of the peak"),
        ({"dram_pct": 40.0, "l1_pct": 80.0}, "limited by memory's pipes, at 90% of the peak"),
        ({"l1_pct": 80.0, "l2_pct": 89.0}, "limited by the L2 cache, at 89% of the peak"),
        ({"l1_pct": 90.0, "l2_pct": 70.0}, "limited by L1 and shared memory, at 90% of the peak"),
        ({"tensor_pct": 95.0}, "limited by the tensor pipes, at 95% of the peak"),
        ({"sm_pct": 92.0}, "limited by instructions, at 92% of the peak"),
        (
            {"memory_pct": 20.0, "dram_pct": 18.0},
            "limited by latency, instructions at 30% of the peak: warps wait most for global or "
            "local memory (long_scoreboard)",
        ),
    ],
)
def test_what_limits_a_kernel(values, says):
    assert shown.limiter(changed(**values)) == says


def test_what_limits_a_kernel_of_which_little_is_known():
    assert shown.limiter({"kernels": "x"}) == "limited by what no counter says"
    assert shown.limiter({"stall_gmma": 2.0}).endswith("the registers of a wgmma (gmma)")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "winner and default differ by less than 5% in every counter"),
        ({"dram_read_bytes": 1e6}, "bytes from and to DRAM: 1.50 MB, the default's 2.50 MB"),
        ({"tensor_pct": 50.0}, "use of the tensor pipes: 50%, the default's 0%"),
        ({"bank_conflicts": 80.0}, "differ by less than 30%"),
        ({"bank_conflicts": 9e5}, "bank conflicts of shared memory: 900000, the default's 40"),
        ({"stall_wait": 30.0}, "wait for a fixed latency (wait): 30.00 per issue, the default's"),
        ({"stall_barrier": 0.001}, "differ by less than"),
    ],
)
def test_the_largest_difference(values, says, monkeypatch):
    if "bank_conflicts" in values and values["bank_conflicts"] < 100:
        monkeypatch.setattr(shown, "SAME", 0.3)  # 80 conflicts in 31250 accesses
    assert says in shown.difference(changed(**values), changed())


def test_the_winner_may_be_the_default_or_alone():
    one = changed()
    assert (
        shown.verdict(one, one) == "the winner is the default, limited by DRAM, at 88% of the peak"
    )
    assert shown.verdict(one, None) == "the winner is limited by DRAM, at 88% of the peak"
    assert list(shown.sides(one, None)) == ["winner"]
    assert list(shown.sides(one, dict(one))) == ["default"]
    assert list(shown.sides(one, changed(sm_pct=1.0))) == ["winner", "default"]


# The files.


def rows(**values):
    fields = {"n": 64, "block": 32, "dtype": "bf16", "rounding": "nearest", "layout": "q"}
    return [
        Row(
            "quantize",
            "triton",
            "kernel",
            {"m": m, **fields},
            ok=True,
            ms=1.0,
            gbps=1.0,
            extra={"counters": changed(**values)},
        )
        for m in (64, 128)
    ]


def saved(path, found):
    record = {"name": "NVIDIA H100", "kind": "cuda", "peaks": PEAKS}
    path.write_text(Results(record, found).to_json())
    return path


def test_a_file_says_the_same_again(tmp_path):
    file = saved(tmp_path / "r.json", rows())
    found = Results.load(file)
    assert found.rows[0].extra["counters"]["kernels"] == "first, kernel"
    assert saved(tmp_path / "s.json", found.rows).read_text() == file.read_text()
    assert "counters.dram_of_counted" in found.to_csv().splitlines()[0]


@pytest.mark.parametrize(
    "counters",
    [
        [],
        "x",
        {"kernels": 3},
        {"dram_pct": "many"},
        {"stall_wait": "long"},
        {"dram_read_bytes": -1},
        {"dram_read_bytes": 1e300},
        {"dram_read_bytes": None},
        {"dram_read_bytes": True},
        {"stall_[bold]": 1.0},
        {"kernels": "a\x1b[31m"},
        {"kernels": "x" * 3000},
        {f"stall_{i}": 1.0 for i in range(101)},
    ],
)
def test_a_file_that_says_what_cannot_be(tmp_path, counters):
    file = saved(tmp_path / "r.json", rows())
    content = json.loads(file.read_text())
    content["rows"][0]["counters"] = counters
    file.write_text(json.dumps(content))
    with pytest.raises(Unreadable, match=r"rows\.0"):
        Results.load(file)


def test_the_report_has_a_table_and_a_chart(tmp_path, capsys):
    file = saved(tmp_path / "r.json", rows())
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    words = [str(file), "--readme", str(readme)]
    assert execute("report", words) == 0
    page = (tmp_path / "r.md").read_text()
    assert "## Why is it fast" in page
    assert "r-counters.svg" in page
    assert "- 64×64 triton: limited by DRAM, at 88% of the peak" in page
    drawn = (tmp_path / "r-counters.svg").read_text()
    assert "warps that wait, per issued instruction" in drawn
    assert "long_scoreboard" in drawn
    assert "128×64 triton" in drawn
    capsys.readouterr()
    assert execute("report", [*words, "--check"]) == 0
    saved(file, rows(stall_wait=5.0))
    assert execute("report", [*words, "--check"]) == 1
    assert "r-counters.svg: stale" in capsys.readouterr().out


def test_a_page_without_counters_has_no_such_section(tmp_path):
    plain = [Row("quantize", "triton", "kernel", one.problem, ms=1.0, gbps=1.0) for one in rows()]
    file = saved(tmp_path / "r.json", plain)
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    assert execute("report", [str(file), "--readme", str(readme)]) == 0
    assert "Why is it fast" not in (tmp_path / "r.md").read_text()
    assert not (tmp_path / "r-counters.svg").exists()
    assert "counters" not in show.markdown("x", plain)


# A GPU.


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute")
def test_dram_bytes_are_those_of_the_op(tmp_path, capsys):
    """Half of the bytes that are written, at most an L2 cache, may not have reached DRAM."""
    file = tmp_path / "rows.json"
    words = ["quantize", "--m", "8192", "--n", "16384", "--block", "32", "--kernel", "triton"]
    words += ["--peer", "none", "--profile", "ncu", "-o", str(file)]
    code = execute("bench", words)
    err = capsys.readouterr().err
    if "ERR_NVGPUCTRPERM" in err:
        pytest.skip("the driver lets administrators alone read counters")
    assert code == 0, err
    (row,) = Results.load(file).rows
    found = row.extra["counters"]
    assert found["dram_of_counted"] == pytest.approx(1.0, abs=0.25)
    assert found["duration_ms"] == pytest.approx(row.ms, rel=0.5)
    assert {"sm_pct", "memory_pct", "dram_pct", "occupancy_pct", "registers"} <= found.keys()
    assert {"l2_bytes", "bank_conflicts", "tensor_pct", "l1_pct", "l2_pct"} <= found.keys()
    assert shown.stalls(found)
    assert "quantize" in found["kernels"]


@pytest.mark.gpu
def test_the_range_of_a_run_is_named(capsys, monkeypatch):
    pushed = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(
        torch.cuda.nvtx, "range_push", lambda name: pushed.append(name) or push(name)
    )
    words = ["quantize", "--m", "256", "--block", "32", "--kernel", "triton", "--profile-run"]
    assert execute("bench", words) == 0
    assert pushed == ["jetfire quantize triton"]
    assert "in NVTX range 'jetfire quantize triton'" in capsys.readouterr().out


def test_a_problem_is_named_by_what_differs_among_those_of_its_op():
    found = {"dram_pct": 90.0}
    problems = [
        ("add", {"m": 8, "n": 8, "block": 32, "mode": "fwd"}),
        ("add", {"m": 8, "n": 8, "block": 64, "mode": "fwd"}),
        ("transpose", {"m": 8, "n": 8, "block": 32}),
    ]
    rows = [Row(op, "triton", "kernel", p, ms=1.0, extra={"counters": found}) for op, p in problems]
    said = [one.partition(":")[0] for one in shown.sentences(rows)]
    assert said == ["add 8×8 block=32 triton", "add 8×8 block=64 triton", "transpose 8×8 triton"]
