"""Training steps of any model that FSDP2 spreads over processes: here two, of toys on the CPU."""

import json
import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import processes
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, UsageError
from jetfire.measure import peaks
from jetfire.measure.results import Results, Row
from jetfire.models import cases, parallel, sharded
from jetfire.models.parallel import ParallelBench
from jetfire.report import training as training_report

pytest.importorskip("transformers")
from jetfire.tests.processes import model_steps

CPU = Device.parse("cpu")
SIZES = "layers=2,width=128,heads=4,vocabulary=64,batch=2,context=16"
PEAKS = {"copy_gbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0}
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return self.body(x).float().square().mean()

def make():
    return Net(), torch.randn(8, 64)

def hides():
    class Result:
        def __init__(self, loss):
            self.loss = loss

    class Hiding(Net):
        def forward(self, x):
            return Result(super().forward(x))

    return Hiding(), torch.randn(8, 64)

def dies():
    import os, torch.distributed as dist
    if dist.is_initialized() and dist.get_rank() == 1:
        os._exit(7)
    return make()

def differs():
    import torch.distributed as dist
    if dist.is_initialized() and dist.get_rank() == 1:
        raise OSError("no data\\nat all")
    return make()
"""


# Processes are forks of a server, which has loaded what they need: it takes one alone 6 s.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["jetfire.models.parallel", "transformers.models.gpt2.modeling_gpt2"])


class Forked(processes.Worker):
    def __init__(self, target, *arguments, parent):
        self.connection, theirs = FORKED.Pipe()
        self._output, self._python = processes._Output(), processes._Python(())
        self._grouped = False
        given = (theirs, self._output, None, target, arguments)
        self._process = FORKED.Process(target=processes._child, args=given, daemon=not parent)
        self._process.start()
        theirs.close()


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "Worker", Forked)
    (tmp_path / "ownspread.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    yield tmp_path
    sys.modules.pop("ownspread", None)


def command(word, *more):
    return execute("train", ["bench", word, "--device", "cpu", "--rounds", "2", *more])


def test_two_processes_measure_and_the_first_reports(own, capsys):
    file = own / "r.json"
    more = ["--recipe", "int8-block32-fused,int8-block64", "-o", str(file)]
    assert command("hf:gpt2-124m", "--set", f"{SIZES},parallel=fsdp", *more) == 0
    fused, single, eager = Results.load(file).rows
    assert (fused.kernel, single.kernel, eager.kernel) == (
        "int8-block32-fused",
        "int8-block64",
        "eager",
    )
    for row in (fused, single):
        assert (row.op, row.ok, row.samples, row.graph) == ("model_step", True, 2, False)
        assert (row.problem["parallel"], row.problem["processes"]) == ("fsdp", 2)
        assert row.vs_peer == {"eager": pytest.approx(eager.ms / row.ms, rel=1e-4)}
        assert 1e-3 < row.rel_err < 0.2
    # Two blocks, twice, of which 1 byte of each weight; once what is outside of them, in 2.
    weights, rest = 2 * 12 * 128 * 128, 64 * 128 + 1024 * 128 + 2 * 128
    small = 2 * (9 + 4) * 128
    whole = 4 * (2 * (weights + small) + rest)
    codes = 2 * (weights * (1 + 4 / 32**2) + 4 * small) + 2 * rest
    assert fused.extra["gathered_of_fp32"] == pytest.approx(codes / whole, rel=1e-3)
    assert eager.extra["gathered_of_fp32"] == 0.5
    said = capsys.readouterr()
    assert "run=eager parallel=fsdp processes=2" in said.out
    assert "--set parallel=fsdp" in said.out


def test_an_own_model_without_blocks_is_sharded_as_one(own, capsys):
    assert command("ownspread:make", "--set", "parallel=fsdp", "--recipe", "int8-block32") == 0
    assert "model_step model=ownspread:make run=eager parallel=fsdp processes=2" in (
        capsys.readouterr().out
    )


def test_one_process_gathers_nothing(own, monkeypatch):
    monkeypatch.setattr(parallel, "_ON_CPU", 1)
    more = ["--set", f"{SIZES},parallel=fsdp", "-o", "r.json", "--recipe", "int8-block32"]
    assert command("hf:gpt2-124m", *more) == 0
    row, _ = Results.load(own / "r.json").rows
    assert (row.ok, row.problem["processes"]) == (True, 1)
    assert row.vs_peer.keys() == {"eager"}
    assert "gathered_of_fp32" not in row.extra


@pytest.mark.parametrize(
    ("word", "code", "says"),
    [
        ("ownspread:dies", 1, "jetfire: process 1 of 2: worker ended by exit code 7"),
        ("ownspread:differs", 2, "ownspread:differs: OSError: no data"),
        ("ownspread:hides", 2, "ownspread:hides: FSDP gathers nothing, as it finds no tensor"),
    ],
)
def test_what_one_process_meets_ends_all_in_a_line(word, code, says, own, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "_TROUBLE_S", 3.0)
    assert command(word, "--set", "parallel=fsdp") == code
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_one_gpu_is_one_process_and_a_note_says_so(monkeypatch):
    notes, run = [], []
    alone = Device("cuda", name="One GPU")
    monkeypatch.setattr(Device, "parse", lambda _="auto": alone)
    monkeypatch.setattr(Device, "alike", lambda self: [self])
    monkeypatch.setattr(parallel.terminal, "note", notes.append)
    monkeypatch.setattr(parallel.training, "run", lambda *given: run.append(given))
    asked = parallel.command.BenchOptions(settings=[f"{SIZES},parallel=fsdp"])
    parallel.bench(asked, "hf:gpt2-124m", ["int8"])
    assert notes == ["parallel=fsdp: one process, as there is one One GPU"]
    _, (case,), _, kind = run[0]
    assert (case.parallel, case.processes, kind) == ("fsdp", 1, ParallelBench)


def test_torchrun_is_refused(monkeypatch):
    monkeypatch.setattr(parallel, "torchrun", lambda: True)
    asked = parallel.command.BenchOptions(settings=["parallel=fsdp"])
    with pytest.raises(UsageError, match="expected no torchrun: bench starts the processes"):
        parallel.bench(asked, "hf:gpt2-124m", ["int8"])


def test_only_what_is_spread_says_so():
    case = cases.ModelCase(cases.sources.parse("a:b", {}), ["int8"], "compile")
    assert case.as_dict() == {"model": "a:b", "run": "compile"}
    assert cases.parallel_of(["batch=2,parallel=fsdp", "run=eager"]) == (
        "fsdp",
        ["batch=2", "run=eager"],
    )
    problem = {"model": "a:b", "run": "compile", "parallel": "fsdp", "processes": 2}
    row = Row("model_step", "int8", "kernel", problem, ms=3.0, ok=True)
    assert training_report.step_text(row) == "a:b, run compile, fsdp of 2"
    row = Row("model_step", "int8", "kernel", {**problem, "unit": 4}, ms=3.0, ok=True)
    assert training_report.step_text(row) == "a:b, run compile, fsdp of 2, units of 4 blocks"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["unit=2"], "--set unit=2: expected parallel=fsdp beside it"),
        (["parallel=fsdp,unit=0"], "--set unit=0: expected a number of blocks from 1 to 1000"),
        (["parallel=fsdp,unit=a"], "--set unit=a: expected a number of blocks from 1 to 1000"),
    ],
)
def test_units_that_are_none_are_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        cases.check_bench("hf:gpt2-124m", texts, ["int8"], [])


def test_blocks_are_gathered_by_units(monkeypatch):
    """The last unit has what is left, and the model itself comes last."""
    units = []
    blocks = [torch.nn.Linear(2, 2) for _ in range(5)]
    monkeypatch.setattr(sharded, "fully_shard", lambda unit, **_: units.append(unit))
    monkeypatch.setattr(sharded, "equalise", lambda *_: None)
    monkeypatch.setattr(sharded, "init_device_mesh", lambda *_: None)
    made = SimpleNamespace(
        model=torch.nn.Sequential(torch.nn.ModuleList(blocks)),
        group=SimpleNamespace(world=2),
        variant=SimpleNamespace(compiled=False),
        recipe="",
        device=torch.device("cpu"),
        unit=2,
    )
    assert sharded.ShardedSubject._prepared(made) is made.model
    assert units == [blocks[:2], blocks[2:4], blocks[4:], made.model]


def test_the_cause_is_told_before_its_effects():
    lost = parallel._failure(RuntimeError("Connection closed by peer"), debug=False)
    cause = parallel._failure(UsageError("no such"), debug=False)
    assert lost.follows > cause.follows
    assert isinstance(cause.error(), UsageError)
    assert type(lost.error()) is JetfireError


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What tests/processes/model_steps.py found in two processes."""
    home = tmp_path_factory.mktemp("steps")
    started = [
        FORKED.Process(target=model_steps.main, args=(rank, home), daemon=True) for rank in range(2)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(600)
        assert [process.exitcode for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["int8-block32", "int8-block32-fused", "compile"])
def test_all_blocks_have_one_compiled_graph(name, outcomes):
    """Made by the first call, with the loss's; nothing breaks it, and no step makes another."""
    for outcome in outcomes:
        assert outcome[name]["graphs"] == [2, 2]
        assert outcome[name]["breaks"] == 0
        assert outcome[name]["loss"] == pytest.approx(outcome["eager"]["loss"], rel=2e-3)
        assert outcome[name]["loss"] == outcomes[0][name]["loss"]


def test_fused_blocks_stay_fused_when_sharded(outcomes):
    for outcome in outcomes:
        assert outcome["int8-block32-fused"]["flowed"] > 0
        assert outcome["int8-block32"]["flowed"] == 0
