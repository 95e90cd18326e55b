"""Training steps and blocks as results: checked before they are timed, saved, shown, compared."""

import dataclasses
import json
import math
import re
import sys

import pytest
import torch

from jetfire.bench.compare import match
from jetfire.cli import execute
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.bench import cases, subjects
from jetfire.gpt2.bench import steps as bench
from jetfire.gpt2.bench.cases import (
    EAGER,
    BlockProblem,
    LlamaBlockProblem,
    LlamaStepProblem,
    StepProblem,
    TrainingCase,
    problem_of,
)
from jetfire.gpt2.bench.steps import TrainingBench
from jetfire.gpt2.bench.subjects import BlockSubject, StepSubject
from jetfire.gpt2.model.families import block_of
from jetfire.gpt2.model.shape import Shape
from jetfire.measure import peaks
from jetfire.measure.results import Results, Row
from jetfire.measure.timer import Timing
from jetfire.models import cases as models
from jetfire.nn import recipes
from jetfire.nn.captured import leave_capture
from jetfire.report import documents
from jetfire.report import training as training_report
from jetfire.tests.given import changed

CPU = Device.parse("cpu")
STEP = StepProblem(layers=1, heads=2, width=32, batch=2, context=16, vocabulary=64)
BLOCK = BlockProblem(width=32, heads=2, batch=2, context=16)
LLAMA_BLOCK = LlamaBlockProblem(128, 2, 2, 16, kv_heads=2, hidden=256)
LLAMA_STEP = LlamaStepProblem(1, 2, 128, 4, 32, 256, kv_heads=2, hidden=256)
SIZES = "layers=1,heads=2,width=32,batch=2,context=16,vocabulary=64"
PEAKS = {"copy_gbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0}
WORDS = ["bench", "tiny", "--set", SIZES, "--device", "cpu", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _peaks(monkeypatch):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)


def measure(problem, recipes=("int8-block32",)) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    made = TrainingBench(CPU, notes.append, rounds=2, sample_ms=0.01)
    return made.measure(TrainingCase(problem, recipes)), notes


@pytest.mark.parametrize(
    ("problem", "op"),
    [
        (STEP, "gpt2_step"),
        (BLOCK, "gpt2_block"),
        (LLAMA_BLOCK, "llama_block"),
        (LLAMA_STEP, "llama_step"),
    ],
)
def test_a_right_recipe_is_timed_beside_eager(problem, op, tmp_path):
    (row, eager), notes = measure(problem)
    assert (row.op, row.kernel, row.role, row.ok) == (op, "int8-block32", "kernel", True)
    assert row.problem == dataclasses.asdict(problem)
    assert 1e-3 < row.rel_err < bench.GRADIENT_TOLERANCE
    assert row.ms_p20 <= row.ms <= row.ms_p80
    assert row.vs_peer == {"eager": eager.ms / row.ms}
    assert row.extra["first_step_s"] > 0
    assert (eager.kernel, eager.role, eager.ok) == ("eager", "peer", None)
    assert eager.tflops * eager.ms == pytest.approx(row.tflops * row.ms)
    file = tmp_path / "r.json"
    file.write_text(Results({}, [row]).to_json())
    assert [again.key() for again in Results.load(file).rows] == [row.key()]
    assert not notes


@pytest.mark.parametrize("problem", [STEP, BLOCK, LLAMA_STEP])
def test_a_recipe_in_4_bits_is_checked_along_the_exact_gradient(problem):
    names = tuple(name for name in cases.MEASURED if recipes.RECIPES[name].noisy)
    (*rows, eager), notes = measure(problem, names)
    assert [row.kernel for row in rows] == [
        "int8-kept4",
        "int4-hq-lss",
        "int4-hq-bs",
        "int4-hq",
        "int4-naive",
    ]
    assert all(row.ok and row.vs_peer == {"eager": eager.ms / row.ms} for row in rows), notes
    noise = {row.kernel: row.extra["noise"] for row in rows}
    assert noise["int4-hq-lss"] > noise["int4-hq-bs"] > noise["int4-hq"] > bench.GRADIENT_TOLERANCE
    assert noise["int8-kept4"] < noise["int4-hq"]
    assert all(0 < row.rel_err <= bench.ATTENTION_TOLERANCE for row in rows)


@pytest.mark.parametrize("name", ["expand.weight", "qkv.weight", "dx − dy"])
@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, math.nan])
def test_a_gradient_in_4_bits_may_be_noisy_but_not_wrong(name, factor):
    exact = {name: torch.randn(64, 64), "loss": torch.tensor(4.0)}
    noise = torch.randn(64, 64)
    noise -= (noise * exact[name]).sum() / exact[name].square().sum() * exact[name]
    noisy = {**exact, name: exact[name] + noise}
    found = bench.compared(noisy, exact, noisy=True)
    assert found.wrong == ""
    assert found.error < 1e-6
    assert found.noise == pytest.approx(float(noise.norm() / exact[name].norm()))
    assert bench.compared(noisy, exact).wrong
    other = {**exact, name: factor * exact[name] + noise}
    wrong = bench.compared(other, exact, noisy=True).wrong
    assert wrong.startswith(f"{name}: relative error along")


@pytest.mark.parametrize(("scale", "noise", "along"), [(1.0, 0.5, "0.00"), (0.7, 0.4, "0.30")])
def test_a_wrong_gradient_is_told_as_noise_or_as_a_part_that_is_missing(scale, noise, along):
    exact = {"qkv.weight": torch.ones(64, 64), "loss": torch.tensor(4.0)}
    across = torch.ones(64, 64)
    across[::2] = -1
    found = bench.compared({**exact, "qkv.weight": scale + noise * across}, exact)
    assert f"relative error 0.5 ({along} along it) against BF16 eager's" in found.wrong
    assert not bench.compared({**exact, "qkv.weight": 1 + 0.3 * across}, exact).wrong
    assert bench.compared({**exact, "qkv.weight": 0.9 + 0.3 * across}, exact).wrong
    # Forward's rounding moves what came through attention, and that alone.
    for name, wrong in (("qkv.weight", False), ("fc1.weight", True)):
        theirs = {name: torch.ones(64, 64)}
        assert bool(bench.compared({name: 0.93 + 0.3 * across}, theirs).wrong) == wrong


def test_work_is_counted_as_documented():
    tokens, width, context = 2 * 16, 32, 16
    block = 6 * 12 * width**2 + 12 * width * context
    assert TrainingCase(BLOCK).flops == tokens * block
    gated = 6 * (4 * 128**2 + 3 * 128 * 256) + 12 * 128 * context
    assert TrainingCase(LLAMA_BLOCK).flops == tokens * gated
    per_token = gated + 12 * 128 * (32 - context) + 6 * 128 * 256
    assert TrainingCase(LLAMA_STEP).flops == 4 * 32 * per_token
    assert TrainingCase(STEP).flops == tokens * (block + 6 * width * 64)
    assert (
        TrainingCase(dataclasses.replace(STEP, accumulate=3)).flops == 3 * TrainingCase(STEP).flops
    )


def test_recipes_run_as_graphs_and_compile_as_it_is_faster():
    made = TrainingBench(CPU, print, rounds=2)
    subject = made._maker(TrainingCase(STEP))(EAGER)()
    subject.loss = torch.inf
    timings = {
        f"{name} {kind}": Timing(ms, ms, ms, 3)
        for name, kind, ms in (
            ("int8-block32", "graph", 5.0),
            ("int8-block32", "launched", 4.0),
            ("compile", "graph", 7.0),
            ("compile", "launched", 6.0),
            ("eager", "launched", 8.0),
        )
    }
    for name, role, ms, graph in (
        ("int8-block32", "kernel", 5.0, True),
        ("compile", "peer", 6.0, False),
        ("eager", "peer", 8.0, False),
    ):
        row = made._timed(TrainingCase(STEP), Row("gpt2_step", name, role, {}), timings, subject)
        assert (row.ms, row.graph) == (ms, graph)
        assert ("ms_graph" in row.extra) == (name != "eager")
        assert row.extra["tokens_per_s"] == pytest.approx(32 / ms * 1e3)


class _HalfUnwritten(StepSubject):
    def first(self):
        found = super().first()
        if not self.model.recipe.plain:
            found["blocks.0.qkv.weight"][:, 16:] = 0
        return found


class _OtherLoss(StepSubject):
    def first(self):
        found = super().first()
        if not self.model.recipe.plain:
            found["loss"] = found["loss"] * 1.01
        return found


class _NotFinite(StepSubject):
    def first(self):
        found = super().first()
        if not self.model.recipe.plain:
            found["positions.weight"][0, 0] = torch.nan
        return found


class _NeverLearns(StepSubject):
    """Nothing: its loss stays as it was."""

    def call(self):
        return torch.tensor(self.loss), torch.tensor(0.0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (_HalfUnwritten, "blocks.0.qkv.weight: relative error 0.7"),
        (_OtherLoss, "loss 4."),
        (_NotFinite, "positions.weight: relative error nan"),
        (_NeverLearns, "the loss of the one batch went from 4."),
    ],
)
def test_a_wrong_recipe_is_not_timed(made, says, monkeypatch):
    monkeypatch.setattr(subjects, "StepSubject", made)
    (row, eager), notes = measure(STEP)
    assert row.ok is False
    assert row.error.startswith(says)
    assert row.ms is None
    assert row.vs_peer is None
    assert any(says in note for note in notes)
    assert (eager.ms is None) == (made is not _NeverLearns)


def test_a_recipe_that_fails_leaves_the_others(monkeypatch):
    def fails(problem, name, *rest):
        if name == "int8-block64":
            raise RuntimeError("no such kernel\nat all")
        return StepSubject(problem, name, *rest)

    monkeypatch.setattr(subjects, "StepSubject", fails)
    rows, notes = measure(STEP, ("int8-block64", "int8-block32"))
    assert [(row.kernel, row.ok) for row in rows] == [
        ("int8-block64", False),
        ("int8-block32", True),
        ("eager", None),
    ]
    assert rows[0].error == "RuntimeError: no such kernel"
    assert notes[0].endswith("int8-block64 left out: RuntimeError: no such kernel")


class _Small(TrainingBench):
    """Has room for one variant at a time, as a GPU may have.

    `room` says whether that shows in the timing alone.
    """

    room = True

    def _probed_with_room(self, case, make, subjects):
        self.beside = len(subjects)
        return super()._probed_with_room(case, make, subjects)

    def _probe(self, make):
        if self.beside > 1 and not self.room:
            self.beside = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 PiB")
        return super()._probe(make)

    def _timings(self, case, subjects):
        if len(subjects) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 PiB")
        return super()._timings(case, subjects)


@pytest.mark.parametrize("room", [True, False])
def test_each_is_timed_alone_where_all_do_not_fit_at_once(room, monkeypatch):
    """What was let go is made anew, to the losses that it had."""
    notes: list[str] = []
    made = _Small(CPU, notes.append, rounds=2, sample_ms=0.01)
    made.room = room
    made.peers = [EAGER, "compile"]
    subject = made._maker(TrainingCase(STEP))
    created = []

    def maker(name):
        def make():
            created.append(name)
            return subject(EAGER if name == "compile" else name)()

        return make

    monkeypatch.setattr(made, "_maker", lambda case: maker)
    rows = made.measure(TrainingCase(STEP, ("int8-block32",)))
    names = ["int8-block32", EAGER, "compile"]
    assert [row.kernel for row in rows] == names
    again = names if room else names[:2]  # the last one is alive
    assert created == [*names, *again]
    assert all(row.ms and row.extra["alone"] for row in rows)
    assert rows[0].ok
    assert rows[0].vs_peer == {peer.kernel: peer.ms / rows[0].ms for peer in rows[1:]}
    assert notes == [notes[0]]
    assert notes[0].endswith("no room for all at once: each variant is timed alone")


def test_what_does_not_fit_alone_is_left_out():
    notes: list[str] = []
    made = _Small(CPU, notes.append, rounds=2, sample_ms=0.01)
    made._timings = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory"))
    made.peers = [EAGER]
    assert made.measure(TrainingCase(STEP, ("int8-block32",))) == []
    assert [note.split(": ", 1)[1] for note in notes[1:]] == [
        "int8-block32 left out: OutOfMemoryError: out of memory",
        "eager left out: OutOfMemoryError: out of memory",
    ]


@pytest.mark.gpu
def test_torch_draws_on_after_a_capture_that_failed():
    device = torch.device("cuda:0")

    def fail():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.rand(4, device=device)
            torch.cuda.synchronize()  # which no capture allows

    with pytest.raises(RuntimeError):
        fail()
    leave_capture(device)
    torch.manual_seed(0)
    first = torch.rand(4, device=device)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(4, device=device), first)


def test_every_variant_begins_with_the_same_parameters():
    found = []
    for name in ("int8-block64", EAGER, "int4-hq-lss"):
        made = StepSubject(STEP, name, [], torch.device("cpu"), seed=3)
        found.append(made.model.state_dict())
        x = torch.zeros(2, 16, 32, dtype=torch.bfloat16)
        found.append(BlockSubject(BLOCK, name, x, x, seed=3).model.state_dict())
        y = torch.zeros(2, 16, 128, dtype=torch.bfloat16)
        found.append(BlockSubject(LLAMA_BLOCK, name, y, y, seed=3).model.state_dict())
        of_llama = StepSubject(LLAMA_STEP, name, [], torch.device("cpu"), seed=3)
        found.append(of_llama.model.state_dict())
    int8, bf16, int4 = found[:4], found[4:8], found[8:]
    for ours, theirs in zip(int8, bf16, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for ours, theirs in zip(bf16, int4, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_cases_are_the_presets_and_three_more():
    assert problem_of("wide") == StepProblem(4, 32, 4096, 4, 1024)
    assert problem_of("gpt2-350m") == StepProblem(24, 16, 1024, 8, 1024)
    assert problem_of("gpt2-124m") == StepProblem(12, 12, 768, 16, 1024)
    assert problem_of("block", {"batch": "1"}) == BlockProblem(4096, 32, 1, 2048)
    llama = problem_of("llama-block", {"kv_heads": "8"})
    assert llama == LlamaBlockProblem(4096, 32, 4, 2048, 8, 11008)
    # Of query, key, value and projection, and of the MLP's three.
    weights = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 11008
    per_token = 6 * weights + 12 * 4096 * 2048
    assert TrainingCase(llama).flops == 4 * 2048 * per_token
    step = LlamaStepProblem(12, 12, 768, 8, 1024, kv_heads=12, hidden=2048)
    assert problem_of("llama-160m") == step
    assert problem_of("llama-1b", {"layers": "2"}).shape.flops_per_token == pytest.approx(
        # Its 44.04 million weights of a layer, and the head's.
        6 * (2 * 44.04e6 + 50304 * 2048) + 12 * 2 * 2048 * 2048,
        rel=1e-4,
    )
    assert {problem_of(name) for name in cases.SUITE} < {problem_of(n) for n in cases.names()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "gpt9"], "no case 'gpt9': expected one of block, llama-block, wide, tiny"),
        (
            ["bench", "llama-block", "--set", "kv_heads=3"],
            "kv_heads=3: expected a divisor of heads=32",
        ),
        (
            ["bench", "llama-block", "--set", "width=32"],
            "width=32: expected heads=32 times an even number",
        ),
        (
            ["bench", "llama-block", "--recipe", "int8-block32,int8", "--set", "hidden=96"],
            "hidden of 96: expected a multiple of 128",
        ),
        (["bench", "block", "--set", "layers=2"], "--set layers=2: expected one of width"),
        (["bench", "tiny", "--set", "batch=0"], "--set batch=0: expected an integer"),
        (["bench", "tiny", "--set", "optimizer=sgd"], "optimizer=sgd: expected adamw or adamw8"),
        (
            ["bench", "tiny", "--set", "logits=half"],
            "logits=half: expected recipe or whole or parts",
        ),
        (
            ["bench", "tiny", "--set", "logits=parts", "--recipe", "int8-block32"],
            "logits=parts with recipe=int8-block32: expected a head in INT8",
        ),
        (["bench", "tiny", "--set", "optimiser=adamw"], "(did you mean optimizer?): expected one"),
        (
            ["bench", "block", "--set", "optimizer=adamw8"],
            "--set optimizer=adamw8: block takes no step: expected a preset",
        ),
        (["bench", "tiny", "--recipe", "bf16"], "--recipe bf16: expected one of int8, int8-"),
        (["bench", "tiny", "--peer", "gemm"], "--peer gemm: expected one of eager, compile"),
        (["bench", "tiny", "--append"], "--append: expected -o FILE.json"),
    ],
)
def test_what_is_wrong_with_the_command_is_said(words, says, capsys):
    assert execute("train", [*words, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


def test_the_suite_wants_a_gpu_and_no_other_options(capsys):
    assert execute("bench", ["--suite", "training", "--device", "cpu"]) == 5
    assert execute("bench", ["gemm", "--suite", "training", "--device", "cpu"]) == 2
    assert "leave out OP" in capsys.readouterr().err


def test_the_command_saves_shows_and_appends(tmp_path, capsys):
    file = tmp_path / "r.json"
    one = ["--recipe", "int8-block32", "-o", str(file)]
    assert execute("train", [*WORDS, *one]) == 0
    captured = capsys.readouterr()
    assert "gpt2_step layers=1 heads=2 width=32" in captured.out
    assert "× eager" in captured.out
    assert "jetfire train bench tiny --recipe int8-block32 --set layers=1" in captured.out
    content = json.loads(file.read_text())
    assert content["schema"] == 1
    assert [row["kernel"] for row in content["rows"]] == ["int8-block32", "eager"]
    content["rows"].append({"op": "gelu", "kernel": "triton", "problem": {"m": 1, "n": 1}})
    content["device"]["peaks"] = known = {**PEAKS, "copy_gbps": 7.0}
    file.write_text(json.dumps(content))
    two = ["--recipe", "int8-block32,int8-block128", "-o", str(file), "--append"]
    assert execute("train", [*WORDS, *two]) == 0
    after = Results.load(file)
    assert [row.kernel for row in after.rows] == [
        "int8-block32",
        "eager",
        "triton",
        "int8-block128",
    ]
    assert after.device["peaks"] == known


@pytest.mark.parametrize(
    ("optimizer", "named", "kinds"),
    [("adamw", {}, [torch.float32]), ("adamw8", {"optimizer": "adamw8"}, [torch.int8])],
)
def test_recipes_have_the_optimizer_that_is_asked_for_and_peers_torch_s(optimizer, named, kinds):
    case = cases.case_of("tiny", {"optimizer": optimizer, "batch": "2"}, ["int8-block32"])
    assert case.as_dict() == {**dataclasses.asdict(case.problem), **named}
    make = TrainingBench(CPU, print, rounds=1)._maker(case)
    ours, theirs = make("int8-block32")(), make(EAGER)()
    for subject in (ours, theirs):
        subject.first()
    weight = ours.model.blocks[0].qkv.weight
    assert [ours.optimizer.state[weight]["exp_avg"].dtype] == kinds
    assert type(theirs.optimizer) is torch.optim.AdamW
    assert theirs.optimizer.state[theirs.model.blocks[0].qkv.weight]["exp_avg"].dtype == (
        torch.float32
    )


def test_a_row_says_which_optimizer_its_recipe_had(tmp_path, capsys):
    file = tmp_path / "r.json"
    wide = [changed(SIZES, "width=128") if word == SIZES else word for word in WORDS]
    words = [*wide, "--recipe", "int8-block32", "-o", str(file), "--append"]
    assert execute("train", words) == 0
    assert execute("train", [*words, "--set", "optimizer=adamw8"]) == 0
    out = capsys.readouterr().out
    assert "vocabulary=64 accumulate=1 optimizer=adamw8" in out
    assert "--set optimizer=adamw8" in out  # the command that measures it again
    fp32, torch_s, in_codes, beside = Results.load(file).rows
    assert [row.kernel for row in (fp32, in_codes)] == ["int8-block32"] * 2
    assert in_codes.problem == {**fp32.problem, "optimizer": "adamw8"}
    assert "optimizer" not in fp32.problem
    assert (torch_s.kernel, beside.kernel) == (EAGER, EAGER)
    assert in_codes.ok
    both = [*words[:-1], "--set", "optimizer=adamw8,weights=bf16"]
    assert execute("train", both) == 0
    narrow = Results.load(file).rows[0]
    assert narrow.problem == {**in_codes.problem, "weights": "bf16"}
    assert narrow.ok


def test_a_wrong_result_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subjects, "StepSubject", _HalfUnwritten)
    file = tmp_path / "r.json"
    assert execute("train", [*WORDS, "--recipe", "int8-block32", "-o", str(file)]) == 3
    assert "WRONG" in capsys.readouterr().out
    assert [row.ok for row in Results.load(file).rows] == [False, None]


def training_rows() -> list[Row]:
    step = {
        "layers": 4,
        "heads": 32,
        "width": 4096,
        "batch": 4,
        "context": 1024,
        "vocabulary": 50304,
        "accumulate": 1,
    }
    block = {"width": 4096, "heads": 32, "batch": 8, "context": 2048}
    found = []
    for op, problem in (("gpt2_step", step), ("gpt2_block", block)):
        for name, ms, gib in (
            ("int8-block128", 10.0, 2.0),
            ("eager", 16.0, 5.0),
            ("compile", 13.0, 3.0),
        ):
            role = "peer" if name in subjects.PEERS else "kernel"
            extra = {"peak_gib": 9.0, "activation_gib": gib, "first_step_s": 1.5}
            vs_peer = None
            if role == "kernel":
                vs_peer = {"eager": 1.6, "compile": 1.3, "fp8_tensorwise": 1.1, "fp8_rowwise": 1.2}
                extra["peer_activation_gib"] = {"eager": 5.0, "compile": 3.0}
            found.append(
                Row(
                    op,
                    name,
                    role,
                    problem,
                    ms=ms,
                    ms_p20=ms - 1,
                    ms_p80=ms + 1,
                    tflops=500.0,
                    vs_peer=vs_peer,
                    graph=True,
                    extra=extra,
                )
            )
    return found


def test_the_report_has_them_and_other_tables_do_not():
    device = {"name": "GPU", "kind": "cuda", "peaks": {}}
    page = documents.page(Results(device, training_rows()), "r.json", [])
    line = "| 4 layers of width 4096, 4×1024 tokens | int8-block128 | 10.00 | graph | 500 | "
    assert f"{line}1.60× | 1.30× | 1.10× | 9.00 | 2.00 | 2.50× | 1.50× | – | 1.5 |" in page
    assert "| one block of width 4096, 8×2048 tokens | BF16 eager | 16.00 |" in page
    problem = dataclasses.asdict(problem_of("llama-1b"))
    of_llama = [dataclasses.replace(training_rows()[0], op="llama_step", problem=problem)]
    page = documents.page(Results(device, of_llama), "r.json", [])
    assert "| 22 layers of width 2048 (5632, 4 of 32 heads), 4×2048 tokens | int8-" in page
    rows = training_rows()
    rows += [
        dataclasses.replace(row, kernel="int8") for row in rows if row.kernel == "int8-block128"
    ]
    readme = training_report.readme(Results(device, rows)).markdown()
    assert "tokens, int8 | 10.0 | 1.60× | 1.30× | 1.10× | 2.00 | 2.50× | 1.50× |" in readme
    assert not any(name in readme.split("\n", 2)[2] for name in ("eager |", "int8-block128"))
    assert training_report.readme(Results(device, [])).rows == []
    steps, blocks = training_report.STEP, training_report.BLOCK
    llamas = training_report.LLAMA_STEP, training_report.LLAMA_BLOCK
    assert (steps, blocks, *llamas) == (
        cases.STEP,
        cases.BLOCK,
        cases.LLAMA_STEP,
        cases.LLAMA_BLOCK,
    )
    assert {*training_report.NAMES} == {*cases.PEERS, *models.PEERS}


def test_a_peer_in_fp8_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match="needs torchao, which is not installed: pip install"):
        subjects.in_fp8(torch.nn.Linear(32, 32), "tensorwise")


@pytest.mark.parametrize(
    ("recipe", "kind"), [("tensorwise", "TENSORWISE"), ("rowwise", "AXISWISE")]
)
def test_in_fp8_every_linear_layer_of_a_block_is_torchao_s(recipe, kind):
    pytest.importorskip("torchao.float8")
    block = block_of(Shape(1, 2, 64, 32, vocabulary=64), recipes.get("bf16"))
    subjects.in_fp8(block, recipe)
    found = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    assert len(found) == 4
    assert {type(m).__name__ for m in found} == {"Float8Linear"}
    assert {m.config.cast_config_input.scaling_granularity.name for m in found} == {kind}


def test_two_files_of_them_compare(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    slower = [
        dataclasses.replace(row, ms=row.ms * 2, ms_p20=row.ms * 2 - 1, ms_p80=row.ms * 2 + 1)
        for row in training_rows()
    ]
    files = {before: training_rows(), after: slower}
    for file, rows in files.items():
        file.write_text(Results({"name": "GPU"}, rows).to_json())
    assert execute("compare", [str(before), str(after), "--fail-on-regression", "5%"]) == 4
    assert "2 of 2 kernel rows regressed" in capsys.readouterr().err
    found = match(Results.load(before), Results.load(after))
    assert len(found.pairs) == 6
    assert not found.gone + found.new


def test_a_spreadsheet_has_a_column_for_each_peer():
    columns = Results({}, training_rows()).to_csv().splitlines()[0].split(",")
    assert {"problem.layers", "vs_peer.compile", "peer_activation_gib.eager"} <= set(columns)


def test_no_chart(tmp_path):
    asked = dataclasses.replace(
        bench.command.BenchOptions(ops=()), plot=tmp_path / "p.svg", device="cpu"
    )
    with pytest.raises(UsageError, match="training has no chart"):
        bench.run(asked, [TrainingCase(STEP)], "")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        StepProblem(2, 4, 256, 4, 256),
        BlockProblem(512, 4, 4, 256),
        LlamaBlockProblem(512, 4, 4, 256, kv_heads=2, hidden=1024),
        LlamaStepProblem(2, 4, 256, 4, 256, kv_heads=2, hidden=512),
    ],
)
def test_the_whole_way_on_the_gpu(problem):
    notes: list[str] = []
    quick = {"rounds": 3, "sample_ms": 5.0, "power_ms": 0.0, "chosen": ["compile"]}
    made = TrainingBench(Device.parse("cuda"), notes.append, **quick)
    rows = {row.kernel: row for row in made.measure(TrainingCase(problem, cases.MEASURED))}
    assert [*rows] == [*cases.MEASURED, "eager", "compile"]
    for name in cases.MEASURED:
        row = rows[name]
        assert row.ok, row.error
        assert row.graph, notes
        assert row.vs_peer.keys() == {"eager", "compile"}
        assert 0 < row.extra["activation_gib"] < row.extra["peak_gib"]
        assert row.extra["peer_activation_gib"].keys() == {"eager", "compile"}
    assert not [note for note in notes if "as a CUDA graph left out" in note]


@pytest.mark.parametrize("words", [["block"], ["gpt2-350m", "--set", "layers=2"]])
def test_a_cpu_is_spared_what_is_for_a_gpu(words, capsys):
    assert execute("train", ["bench", *words, "--device", "cpu"]) == 5
    assert "is for a GPU: expected one, or a smaller case" in capsys.readouterr().err


def test_a_cpu_says_which_peers_it_leaves_out(capsys):
    assert execute("train", [*WORDS, "--recipe", "int8-block32", "--peer", "compile"]) == 0
    said = capsys.readouterr()
    assert "compile left out: runs on a GPU only" in said.err
    assert "eager" in said.out


def test_no_peer_is_eager_alone(capsys):
    assert execute("train", [*WORDS, "--recipe", "int8-block32", "--peer", "none"]) == 0
    said = capsys.readouterr()
    assert "left out" not in said.err
    assert "† " not in said.out


@pytest.mark.parametrize("form", ["table", "md"])
def test_an_error_of_a_part_alone_says_so(form, capsys):
    """Of a noisy recipe it may be less than that of one with less noise."""
    words = ["--recipe", "int8,int8-kept4", "--peer", "none", "--format", form]
    assert execute("train", [*WORDS, *words]) == 0
    out = capsys.readouterr().out
    (marked,) = (line for line in out.splitlines() if "e-" in line and "†" in line)
    assert "int8-kept4" in marked
    assert re.search(r"† of the part along BF16's .* noise, of [\d.]+% \(int8-kept4\)", out)


@pytest.mark.parametrize("name", ["block", "wide"])
def test_heads_must_divide_the_width(name, capsys):
    assert execute("train", ["bench", name, "--set", "width=100"]) == 2
    assert "width=100: expected a multiple of heads=32" in capsys.readouterr().err


@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_a_size_of_many_digits_is_refused(digits):
    with pytest.raises(UsageError, match="expected an integer of at least 1, and of at most 18"):
        problem_of("tiny", {"batch": "9" * digits})


def test_a_problem_s_text_names_what_is_not_usual():
    row = training_rows()[0]
    problem = {**row.problem, "optimizer": "adamw8", "weights": "bf16"}
    text = training_report.step_text(dataclasses.replace(row, problem=problem))
    assert text.endswith(" tokens, optimizer adamw8, weights bf16")
    problem = {"model": "hf:gpt2-350m", "run": "compile", "adapters": 16}
    text = training_report.step_text(dataclasses.replace(row, problem=problem))
    assert text == "hf:gpt2-350m, run compile, adapters of rank 16"
