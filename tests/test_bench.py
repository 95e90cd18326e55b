"""The runner: nothing is timed that is wrong, and whatever is left out is said."""

import dataclasses
import errno
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from jetfire.bench import command as bench_command
from jetfire.bench import suite
from jetfire.cli import execute
from jetfire.core import registry, workloads
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.core.kernel import Config, Kernel
from jetfire.measure import peaks, peers, runner
from jetfire.measure.nvml import Nvml
from jetfire.measure.plan import Case
from jetfire.measure.results import Results, Row
from jetfire.measure.runner import Options, Runner
from jetfire.report import chart
from jetfire.report.plot import plot, series_of

CPU = Device.parse("cpu")
PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1}
FAST = Options(rounds=2, sample_ms=0.01, kernels=["int_mm"])


def case(**fields: Any) -> Case:
    op = registry.get("gemm")
    return Case(op, op.Problem.parse({"m": 33, "n": 20, "k": 40, "block": 32, **fields}))


def measure(options: Options = FAST, **fields: Any) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    return Runner(CPU, PEAKS, options, notes.append).measure(case(**fields)), notes


@dataclasses.dataclass(frozen=True)
class NoConfig(Config):
    """Nothing to choose."""


class Fake(Kernel):
    """A kernel that writes what it is told to, wherever it is asked to run."""

    op = "gemm"
    Config = NoConfig

    def __init__(self, name: str, write: Any) -> None:
        self.name = name  # type: ignore[misc]
        self.write = write
        self.launches = 0

    def legal(self, problem, config, device):
        return None

    def default(self, problem, device):
        return NoConfig()

    def space(self, problem, device):
        return {}

    def launch(self, problem, config, inputs, outputs):
        self.launches += 1
        self.write(self, problem, inputs, outputs)


def _right(kernel, problem, inputs, outputs):
    outputs["c"].copy_(registry.get("gemm").reference(problem, inputs)["c"])


def _one_element_unwritten(kernel, problem, inputs, outputs):
    c = outputs["c"]
    c.view(-1)[1:] = registry.get("gemm").reference(problem, inputs)["c"].view(-1)[1:].to(c.dtype)


def _raises(kernel, problem, inputs, outputs):
    raise RuntimeError("out of resources\nand a second line")


def _right_once(kernel, problem, inputs, outputs):
    _right(kernel, problem, inputs, outputs)
    if kernel.launches > 1:
        outputs["c"].mul_(1.5)


@pytest.fixture
def with_kernels(monkeypatch):
    def install(*kernels: Fake):
        found = {kernel.name: kernel for kernel in kernels}
        monkeypatch.setattr(registry, "kernels", lambda _: found)

    return install


ALL = dataclasses.replace(FAST, kernels=None)


def test_a_right_kernel_is_timed_and_rated():
    rows, notes = measure()
    kernel, *others = rows
    assert kernel.ok
    assert kernel.config == {}
    assert kernel.profile == "default"
    assert [row.kernel for row in others] == ["fp32_matmul", "bf16_matmul"]
    assert kernel.ms_p20 <= kernel.ms <= kernel.ms_p80
    flops, seconds = 2 * 33 * 20 * 40, kernel.ms / 1e3
    # Codes of both operands, their scales of 2×2 and 1×2 blocks, and BF16 out.
    nbytes = 33 * 40 + 20 * 40 + 4 * (2 * 2 + 1 * 2) + 2 * 33 * 20
    assert kernel.tflops == pytest.approx(flops / seconds / 1e12)
    assert kernel.gbps == pytest.approx(nbytes / seconds / 1e9)
    assert kernel.roofline == pytest.approx(max(flops / 0.1e12, nbytes / 10e9) / seconds)
    assert kernel.vs_peer == {row.kernel: row.ms / kernel.ms for row in others}
    assert all(row.role == "peer" and row.ok is None and row.roofline is None for row in others)
    assert not notes


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (_one_element_unwritten, "c: 1 elements off, first at (0, 0): nan where"),
        (_raises, "RuntimeError: out of resources"),
    ],
)
def test_a_wrong_kernel_is_not_timed_and_others_are(with_kernels, write, says):
    wrong, right = Fake("wrong", write), Fake("right", _right)
    with_kernels(wrong, right)
    rows, notes = measure(ALL)
    assert wrong.launches == 1
    assert (rows[0].ok, rows[0].ms, rows[0].vs_peer) == (False, None, None)
    assert rows[0].error.startswith(says)
    assert "\n" not in rows[0].error
    assert rows[1].ok
    assert rows[1].ms is not None
    assert any("wrong is wrong" in text for text in notes)


def test_a_kernel_that_goes_wrong_while_timed_is_found(with_kernels):
    with_kernels(Fake("drifts", _right_once))
    rows, _ = measure(ALL)
    assert rows[0].ok is False
    assert rows[0].ms is None
    assert rows[0].error.endswith("after timing")


def test_without_a_right_kernel_no_peer_is_timed(with_kernels):
    with_kernels(Fake("wrong", _raises))
    rows, _ = measure(ALL)
    assert [row.kernel for row in rows] == ["wrong"]


def test_a_wrong_kernel_exits_3(with_kernels, monkeypatch, capsys):
    with_kernels(Fake("wrong", _one_element_unwritten), Fake("right", _right))
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    words = ["gemm", "--m", "33", "--block", "32", "--device", "cpu", "--rounds", "2"]
    assert execute("bench", words) == 3
    captured = capsys.readouterr()
    assert "WRONG" in captured.out
    assert "right" in captured.out
    assert captured.err.splitlines()[-1].startswith("jetfire: 1 of 4 rows is wrong: c: 1 elem")


def test_what_reads_a_gpu_is_opened_once_and_reaches_the_measuring(monkeypatch):
    monitor = SimpleNamespace(driver=lambda: "1", utilisation=lambda: None)
    opened, found = [], []

    def measure(self, case, options):
        found.append(self.monitor)
        return [Row("gemm", "torch", "kernel", case.problem.as_dict(), ok=True, ms=1.0)]

    monkeypatch.setattr(Nvml, "open", lambda device: opened.append(device.type) or monitor)
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    monkeypatch.setattr(Runner, "measure", measure)
    assert execute("bench", ["gemm", "--m", "33", "--block", "32", "--device", "cpu"]) == 0
    assert opened == ["cpu"]
    assert found == [monitor]


def test_what_is_asked_for_reaches_the_measuring(monkeypatch):
    again, found = [], []

    def cached(device, remeasure):
        again.append(remeasure)
        return PEAKS

    def measure(self, case, options):
        found.append(options)
        return [Row("gemm", "torch", "kernel", case.problem.as_dict(), ok=True, ms=1.0)]

    monkeypatch.setattr(peaks, "cached", cached)
    monkeypatch.setattr(Runner, "measure", measure)
    words = [
        "gemm",
        "--m",
        "33",
        "--block",
        "32",
        "--device",
        "cpu",
        "--kernel",
        "int_mm",
        "--peer",
        "fp32_matmul",
        "--data",
        "heavy",
        "--seed",
        "7",
        "--rounds",
        "3",
        "--remeasure-peaks",
        "--debug",
    ]
    assert execute("bench", words) == 0
    assert again == [True]
    assert found == [
        Options(
            kernels=["int_mm"],
            peers=["fp32_matmul"],
            data="heavy",
            seed=7,
            rounds=3,
            budget_s=10.0,
            debug=True,
        )
    ]


def test_what_no_kernel_takes_is_said(with_kernels, monkeypatch, capsys):
    refuses = Fake("refuses", _right)
    refuses.legal = lambda *_: "only on Tuesdays"  # type: ignore[method-assign]
    with_kernels(refuses)
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    assert execute("bench", ["gemm", "--m", "33", "--device", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("gemm: refuses left out: only on Tuesdays") == 1
    assert errors.splitlines()[-1].startswith("jetfire: nothing was measured")


def test_a_problem_too_large_is_left_out_before_allocating(monkeypatch):
    monkeypatch.setattr(runner, "memory_free", lambda _: 1000)
    monkeypatch.setattr(registry.get("gemm"), "reference", lambda *_: pytest.fail("it allocated"))
    rows, notes = measure()
    assert rows == []
    assert "needs about 0.0 GiB, 0.0 GiB are free" in notes[0]


def test_a_dry_run_says_which_problem_is_too_large(monkeypatch, capsys):
    free = runner.memory_needed(case(m=64, n=64, k=64), CPU)
    monkeypatch.setattr(runner, "memory_free", lambda _: free)
    words = ["gemm", "--m", "64,4096", "--block", "32", "--device", "cpu", "--dry-run"]
    assert execute("bench", words) == 0
    lines = capsys.readouterr().out.splitlines()
    small, large = (line for line in lines if line.startswith("gemm m="))
    assert "left out" not in small
    lack = runner.memory_lack(case(m=4096, n=4096, k=4096), CPU)
    assert large.endswith(f": left out: {lack}")
    assert large == lines[-1]  # none of its kernels is listed


def test_memory_needed_covers_inputs_outputs_and_reference():
    size = 1024
    needed = runner.memory_needed(case(m=size, n=size, k=size), CPU)
    assert needed > 2 * size**2 + 2 * size**2 + 8 * 3 * size**2


def test_memory_needed_is_that_of_every_set_of_inputs():
    large = case(m=1024, n=1024, k=1024)
    one = runner.memory_needed(large, CPU)
    cold = dataclasses.replace(CPU, l2_bytes=10 << 20)
    assert runner.sets_of(large, CPU) == 1
    assert runner.sets_of(large, cold) == 8  # of 4 MiB each, three times what the cache holds
    codes_and_out, twice_as_bf16 = 4 << 20, 2 * 2 * (3 << 20)
    assert runner.memory_needed(large, cold) - one > 7 * (codes_and_out + twice_as_bf16)


def test_every_set_of_inputs_is_drawn_anew(monkeypatch):
    drawn = []
    op = registry.get("gemm")
    inputs = type(op).inputs

    def spy(problem, device, seed=0, data="normal"):
        drawn.append((seed, data))
        return inputs(op, problem, device, seed, data)

    monkeypatch.setattr(op, "inputs", spy)
    cold = dataclasses.replace(CPU, l2_bytes=4096)
    options = dataclasses.replace(FAST, seed=5, data="heavy", peers=[])
    Runner(cold, PEAKS, options, print).measure(case())
    seeds = [seed for seed, data in drawn if data == "heavy"]
    timed, proved = seeds[:4], seeds[4:]
    assert timed == [5, 6, 7, 8]
    assert len(proved) == 4
    assert not {*timed} & {*proved}


def test_a_peer_that_cannot_run_is_said(monkeypatch):
    def refuse() -> Any:
        raise peers.Unsupported("needs a moon")

    def fail() -> Any:
        raise RuntimeError("no\nsuch thing")

    named = {"fp32_matmul": refuse, "bf16_matmul": fail}
    monkeypatch.setattr(peers, "gemm", lambda *_: named)
    rows, notes = measure()
    assert [row.kernel for row in rows] == ["int_mm"]
    assert rows[0].vs_peer == {}
    assert notes == [
        "gemm: peer fp32_matmul left out: needs a moon",
        "gemm: peer bf16_matmul left out: RuntimeError: no",
    ]


def test_a_peer_that_is_not_here_is_said():
    rows, notes = measure(dataclasses.replace(FAST, peers=["cublas_bf16"]))
    assert [row.role for row in rows] == ["kernel"]
    assert notes == ["gemm: no peer cublas_bf16 on cpu: there are fp32_matmul, bf16_matmul"]


@pytest.mark.parametrize("fields", [{"accumulate": True}, {"out": "int8", "layout": "both"}])
def test_other_outputs(fields):
    rows, _ = measure(**fields)
    assert rows[0].ok
    assert rows[0].ms is not None


def test_the_interpreter_is_left_out_unless_named():
    device = dataclasses.replace(CPU, interpreted=True)
    reasons = {c.kernel.name: c.reason for c in runner.choices(case(), device, ALL)}
    assert "interpreter" in reasons["triton"]
    named = dataclasses.replace(FAST, kernels=["triton"])
    assert "interpreter" not in str(runner.choices(case(), device, named)[0].reason)


def test_a_config_given_replaces_the_default():
    device = dataclasses.replace(CPU, interpreted=True)
    options = dataclasses.replace(FAST, kernels=["triton"], config={"warps": "8"})
    (choice,) = runner.choices(case(), device, options)
    assert choice.config.warps == 8
    assert choice.profile is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("PASSIVE", "1000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "7"}, (None, "7")),
    ],
)
def test_every_command_has_threads_wait_asleep_unless_the_user_says(given, found, monkeypatch):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert execute(None, ["list"]) == 0
    assert tuple(map(os.environ.get, names)) == found
    for name in names:
        os.environ.pop(name, None)


def test_suites_hold_what_they_promise():
    whole = [c for c, _ in suite.cases("results", Options())]
    assert len(set(whole)) == len(whole)
    parts = {c for name in suite.PARTS for c, _ in suite.cases(name, Options())}
    assert parts == set(whole)
    assert {c.op.name for c in whole} == set(registry.names())
    compiled = [
        c
        for part in ("targets", "int4")
        for c, o in suite.cases(part, Options())
        if "compile" in (o.peers or ())
    ]
    for op in registry.names():
        if op not in ("gemm", "fallback_gemm", "int4_gemm", "hadamard_gemm"):
            modes = {getattr(c.problem, "mode", "fwd") for c in compiled if c.op.name == op}
            assert modes == set(registry.get(op).modes), op
    gemms = [c.problem for c in whole if c.op.name == "gemm"]
    assert {p.block for p in gemms} == {32, 64, 128}
    assert {p.m for p in gemms if p.m == p.n == p.k} == {512, 1024, 2048, 4096, 8192, 16384}
    assert any(p.accumulate for p in gemms)
    for op, mode in (("int4_gemm", "fwd"), ("hadamard_gemm", "fwd"), ("hadamard_gemm", "bwd")):
        paper = workloads.problems(registry.get(op), "int4-paper", mode, {})
        assert {c.problem for c in whole if c.op.name == op} >= set(paper)
    groups = {
        c.problem.group
        for c in whole
        if c.op.name == "hadamard_quantize" and c.problem.layout == "packed"
    }
    assert groups == {1, 32, 128, 1024}


def rows_of(*shapes: tuple[int, int, int]) -> list[Row]:
    found = []
    for m, n, k in shapes:
        for block in (32, 128):
            problem = {"m": m, "n": n, "k": k, "block": block}
            for name, role, tflops in (("triton", "kernel", block), ("cublas", "peer", 700)):
                ms = 2 * m * n * k / tflops / 1e9
                gbps = 2 * m * n / ms / 1e6
                found.append(Row("gemm", name, role, problem, ms=ms, tflops=tflops, gbps=gbps))
    return found


def test_series_split_kernels_by_field_and_peers_by_name():
    labels = [series.label for series in series_of(rows_of((64, 64, 64), (128, 128, 128)))]
    assert labels == ["triton, block 32", "triton, block 128", "cublas"]


@pytest.mark.parametrize(
    "shapes",
    [
        [(64, 64, 64), (128, 128, 128)],  # sizes
        [(64, 64, 64), (64, 128, 64)],  # one dimension moves
        [(64, 32, 16), (16, 64, 48), (16, 64, 64)],  # a list of shapes
        [(64, 64, 64)],  # bars
    ],
)
def test_plots_of_every_kind_of_axis(shapes, tmp_path):
    device = {"name": "GPU", "peaks": {"copy_gbps": 4000, "int8_tops": 900, "bf16_tflops": 700}}
    files = [tmp_path / name for name in ("a.svg", "b.svg", "c.png")]
    for file in files:
        plot(rows_of(*shapes), device, file, "what it shows")
    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text()
    assert "triton, block 32" in text
    assert "what it shows" in text
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_plot_option_draws_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    file = tmp_path / "p.svg"
    words = ["gemm", "--m", "16,32", "--block", "32", "--device", "cpu", "--rounds", "2"]
    assert execute("bench", [*words, "--plot", str(file)]) == 0
    assert "int_mm" in file.read_text()


@pytest.mark.gpu
def test_the_whole_way_on_the_gpu(tmp_path, capsys):
    file = tmp_path / "r.json"
    words = ["gemm", "quantize", "--m", "512", "--block", "32", "--rounds", "3"]
    assert execute("bench", [*words, "-o", str(file)]) == 0
    results = Results.load(file)
    assert results.device["kind"] == "cuda"
    kernels = [row for row in results.rows if row.role == "kernel"]
    assert {row.op for row in kernels} == {"gemm", "quantize"}
    assert all(row.ok and row.graph for row in kernels)
    assert {"cublas_bf16", "compile", "copy"} <= {row.kernel for row in results.rows}
    assert json.loads(file.read_text())["device"]["peaks"]["copy_gbps"] > 100


def test_the_ceiling_multiplies_what_it_is_given():
    from jetfire.measure import ceiling

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    m, n, k = 16, 32, 64
    a, b = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device=device) for rows in (m, n))
    c = torch.empty((2, m, n), dtype=torch.int32, device=device)
    ceiling.int8_kernel[(2,)](a, b, c, 3, M=m, N=n, K=k, num_warps=4)
    expected = 3 * (a.cpu().int() @ b.cpu().int().t())
    assert torch.equal(c.cpu(), expected.expand(2, m, n))
    _, operations = ceiling.int8_call(device, 2, 3)
    assert operations == 2 * 3 * 2 * 128 * 128 * 256


@pytest.mark.parametrize(("name", "value"), [("format", "nope"), ("rounds", 0)])
def test_options_are_refused_by_the_function_too(name, value):
    with pytest.raises(UsageError, match=f"^--{name} {value}: expected"):
        bench_command.bench(bench_command.BenchOptions(["gemm"], device="cpu", **{name: value}))


def test_a_plot_that_cannot_be_drawn_whole_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    file = tmp_path / "old.svg"
    file.write_text("old")

    def half(_, to, **options):
        to.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space"):
        chart.save(Figure(), file, "")
    assert file.read_text() == "old"
