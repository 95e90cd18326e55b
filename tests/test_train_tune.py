"""`jetfire train tune`: which problems a training step asks for, and who tunes them."""

import contextlib
import csv
import dataclasses
import io
import json

import pytest

from jetfire.cli import execute
from jetfire.core import registry, terminal
from jetfire.core.device import Device
from jetfire.core.errors import Interrupted, UsageError, WrongResultError
from jetfire.gpt2.bench import cases, tuning
from jetfire.gpt2.data import prepare
from jetfire.gpt2.training.settings import make
from jetfire.measure.plan import Case
from jetfire.measure.timer import Timing
from jetfire.tuner.options import TuneOptions
from jetfire.tuner.search import Final, FinishedSearch, SearchTarget
from jetfire.tuner.space import Space

WIDTH, TOKENS, ROWS = 64, 32, 128  # the table of 100 tokens is padded to 128 rows
SMALL = {"layers": 3, "heads": 2, "width": WIDTH, "context": 16, "batch": 2, "accumulate": 4}
GEMM = Case(registry.get("gemm"), registry.get("gemm").Problem(64, 64, 64))
ASKED = TuneOptions(cases=(), kernels=(), device="auto", budget_s=8.0)


@pytest.fixture(scope="module")
def asked_for() -> dict[str, set]:
    """Op name → the problems of a step of three blocks."""
    settings = make("tiny", {**SMALL, "recipe": "int8-block64", "parallel": "ddp"})
    found: dict[str, set] = {}
    for wanted in tuning.cases(settings, 100, Device.parse("cpu")).values():
        for case in wanted:
            assert case.problem not in found.setdefault(case.op.name, set())
            found[case.op.name].add(case.problem)
    return found


def test_a_step_asks_for_every_product_of_its_linear_layers(asked_for):
    shapes = {(p.m, p.n, p.k) for p in asked_for["gemm"]}
    expected = set()
    for out, inp in ((3, 1), (1, 1), (4, 1), (1, 4)):
        o, i = out * WIDTH, inp * WIDTH
        expected |= {(TOKENS, o, i), (TOKENS, i, o), (o, i, TOKENS)}
    assert shapes == expected


def test_a_step_asks_for_what_flows_between_the_products(asked_for):
    assert set(asked_for) == {
        "adamw",
        "add",
        "add_rows",
        "column_sum",
        "cross_entropy",
        "gelu",
        "gemm",
        "layernorm",
        "quantize",
        "quantize_qkv",
    }
    assert {p.mode for p in asked_for["add"]} == {"fwd"}
    for name in ("cross_entropy", "gelu", "layernorm"):
        assert {p.mode for p in asked_for[name]} == {"fwd", "bwd"}, name
    assert {p.block for ps in asked_for.values() for p in ps if hasattr(p, "block")} == {64}
    assert {(p.m, p.n, p.valid) for p in asked_for["cross_entropy"]} == {(TOKENS, ROWS, 100)}
    # Between blocks the gradient's codes go both ways; into the first one nobody takes them.
    backward = [p for p in asked_for["layernorm"] if p.mode == "bwd"]
    assert {(p.residual, p.layout) for p in backward} == {(True, "q"), (True, "both")}


def test_a_step_of_llama_asks_for_its_own():
    sizes = {"family": "llama", "tied": False, "heads": 4, "kv_heads": 2, "width": 128}
    settings = make("tiny", {**SMALL, **sizes, "hidden": 192, "recipe": "int8-block64"})
    found: dict[str, set] = {}
    for wanted in tuning.cases(settings, 100, Device.parse("cpu")).values():
        for case in wanted:
            found.setdefault(case.op.name, set()).add(case.problem)
    assert {"rmsnorm", "rope", "swiglu"} <= found.keys()
    assert not {"add_rows", "gelu", "layernorm"} & found.keys()
    linears = [(256, 128), (128, 128), (384, 128), (128, 192)]  # those of one input as one
    assert {(p.m, p.n, p.k) for p in found["gemm"]} >= {
        shape for out, inp in linears for shape in ((TOKENS, out, inp), (TOKENS, inp, out))
    }


def test_a_step_asks_for_the_update_of_every_weight(asked_for):
    weights = {(out * WIDTH, inp * WIDTH) for out, inp in ((3, 1), (1, 1), (4, 1), (1, 4))}
    assert {(p.m, p.n) for p in asked_for["adamw"]} == weights


def test_a_step_in_4_bits_asks_for_its_stages():
    settings = make("tiny", {**SMALL, "recipe": "int4-hq-lss"})
    found: dict[str, set] = {}
    for made in tuning.cases(settings, 100, Device.parse("cpu")).values():
        for case in made:
            found.setdefault(case.op.name, set()).add(case.problem)
    of_products = {"bit_split", "gather_rows", "hadamard_quantize", "int4_gemm", "sample_rows"}
    between = {"add", "dequantize", "gelu", "layernorm", "quantize", "quantize_qkv"}
    of_codes = {"bit_split_codes", "hadamard_quantize_codes", "measured_step"}
    assert set(found) == {*of_products, *between, *of_codes, "add_rows", "cross_entropy"}
    shapes = {
        name: {(p.m, p.n, p.k) for p in found["int4_gemm"] if p.product == name}
        for name in ("fwd", "dgrad", "wgrad")
    }
    linears = [(out * WIDTH, inp * WIDTH) for out, inp in ((3, 1), (1, 1), (4, 1), (1, 4))]
    assert shapes["fwd"] == {(TOKENS, out, inp) for out, inp in linears}
    assert {shape[1:] for shape in shapes["dgrad"]} == {(inp, out) for out, inp in linears}
    assert {shape[:2] for shape in shapes["wgrad"]} == set(linears)
    assert {(p.product, p.keep) for p in found["sample_rows"]} == {("both", "half")}
    # What was clipped of a weight its wide codes tell, of an input its packed ones.
    told = {"wide": set(linears), "codes": {(TOKENS, inp) for _, inp in linears}}
    back = [p for p in found["hadamard_quantize"] if p.mode == "bwd"]
    assert {p.given for p in back} == set(told)
    assert all({(p.m, p.n) for p in back if p.given == by} == told[by] for by in told)
    # No product of parts reads a gradient's transpose, nor its bias's sums.
    gradients = [p for name in ("gelu", "layernorm") for p in found[name] if p.mode == "bwd"]
    assert {p.layout for p in (*gradients, *found["quantize_qkv"])} == {"q"}
    assert {p.sums for p in found["bit_split_codes"]} == {True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {(False, False), (True, False)}),
        ({"accumulate": 1}, {(False, True)}),
        ({"parallel": "ddp"}, {(False, True)}),
        ({"compile": True}, {(False, True)}),
    ],
)
def test_the_products_of_gradients_add_where_those_of_training_do(changes, expected):
    """The first micro-batch writes gradients, the others add to them; autograd adds what is spread.

    A lone one's come with squares, and a profile serves both.
    """
    settings = make("tiny", {**SMALL, "recipe": "int8-block64", **changes})
    wanted = tuning.cases(settings, 100, Device.parse("cpu")).values()
    products = {one.problem for of_one in wanted for one in of_one if one.op.name == "gemm"}
    assert {(p.accumulate, p.squares) for p in products if p.out == "fp32"} == expected


@pytest.mark.parametrize("name", ["block", "wide"])
def test_a_case_of_the_bench_asks_for_what_its_recipes_launch(name):
    """Of each weight the same three products; of a step the head's too, and the update."""
    sizes = {"heads": "2", "width": "64", "context": "16", "batch": "2"}
    if name == "wide":
        sizes |= {"layers": "3", "vocabulary": "128", "accumulate": "3"}
    case = cases.case_of(name, sizes, ["int8-block64"])
    found: dict[str, set] = {}
    for wanted in tuning.case_problems(case, "int8-block64", Device.parse("cpu")).values():
        for one in wanted:
            found.setdefault(one.op.name, set()).add(one.problem)
    shapes = {(p.m, p.n, p.k) for p in found["gemm"]}
    linears = [(192, 64), (64, 64), (256, 64), (64, 256)]
    assert shapes >= {
        shape for o, i in linears for shape in ((TOKENS, o, i), (TOKENS, i, o), (o, i, TOKENS))
    }
    assert ("adamw" in found) == ("cross_entropy" in found) == (name == "wide")
    assert {p.accumulate for p in found["gemm"]} == {False, *([True] if name == "wide" else [])}


def test_dropout_and_a_second_look_change_what_is_asked_for():
    settings = make("tiny", {**SMALL, "dropout": 0.1})
    here = Device.parse("cpu")
    first, second = (tuning.cases(settings, 100, here) for _ in range(2))
    assert first == second  # what was asked for before is asked for again
    assert any(case.op.name == "dropout" for cases in first.values() for case in cases)
    bf16 = dataclasses.replace(settings, recipe="bf16")
    assert tuning.cases(bf16, 100, here) == {}


def test_runs_are_those_of_training():
    assert [one.recipe for one in cases.runs_of("tiny", [], [], None)] == ["int8"]
    (one,) = cases.runs_of("tiny", [], ["recipe=int8-block64,batch=3"], "openwebtext")
    assert (one.recipe, one.batch, one.data) == ("int8-block64", 3, "openwebtext")
    recipes = ["int8-block128", "int8-block32"]
    assert [one.recipe for one in cases.runs_of("tiny", recipes, [], None)] == recipes


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 256),
        ({"tokenizer": "auto"}, 256),
        ({"tokenizer": "gpt2"}, 50257),
        ({"tokenizer": "auto", "data": "openwebtext"}, 50257),
        ({"tokenizer": "auto", "data": "/somewhere/text.txt"}, 50257),
    ],
)
def test_the_vocabulary_is_known_before_the_text_is_prepared(
    changes, tokens, monkeypatch, tmp_path
):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path))
    assert tuning.vocabulary_of(make("tiny", changes)) == tokens


def test_a_vocabulary_of_characters_is_the_prepared_text_s(monkeypatch, tmp_path):
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path))
    (tmp_path / "text.txt").write_text("abcab " * 300)
    chars = make("shakespeare-char", {})
    with pytest.raises(UsageError, match="jetfire train prepare shakespeare-char --tokenizer char"):
        tuning.vocabulary_of(chars)
    prepare.prepare("shakespeare-char", copy=tmp_path / "text.txt")
    assert tuning.vocabulary_of(chars) == 4
    folder = prepare.prepare(tmp_path / "text.txt", "char", tmp_path / "tokens")
    assert tuning.vocabulary_of(make("tiny", {"data": str(folder)})) == 4


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("wid", ["--data", "bytes"], "no case 'wid' (did you mean wide?)"),
        ("wide", ["--data", "bytes"], "--data bytes: wide has a vocabulary of its own"),
        ("block", ["--set", "vocabulary=9"], "--set vocabulary=9"),
        ("block", ["--recipe", "bf16"], "--recipe bf16: expected one of int8, int8-block32"),
    ],
)
def test_a_case_of_the_bench_is_checked_as_there(case, options, message, capsys):
    assert execute("train", ["tune", case, "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to tune for training on {}: expected a GPU"),
        (["--recipe", "bf16"], "--recipe bf16: expected one of int8, int8-block32"),
        (["--set", "recipe=bf16"], "--recipe bf16: expected one of int8, int8-block32"),
        (["--set", "wide=1"], "no setting 'wide'"),
        (["--budget", "soon"], "--budget soon: expected a time"),
        (["--trials", "0"], "--trials 0: expected at least 1"),
        (["--shard", "4/4"], "--shard 4/4: expected I/N"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(options, message, capsys):
    code = 2 if options else 5
    assert execute("train", ["tune", "tiny", "--device", "cpu", *options]) == code
    error = capsys.readouterr().err
    assert message.format(Device.parse("cpu").label) in error
    assert error.count("\n") == 1


def tuned(monkeypatch, tune, seconds=0.0):
    """Run with a tuner and a clock of ours; the kernel, problems and budget of each search."""
    calls = []
    clock = iter(seconds * i for i in range(100))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(clock))

    def record(asked, *give):
        calls.append((asked.kernels, len(asked.cases), asked.budget_s))
        tune(asked, *give)

    monkeypatch.setattr(tuning.command, "tune", record)
    return calls


def test_kernels_share_the_time_by_their_problems(monkeypatch):
    calls = tuned(monkeypatch, lambda *_: None, seconds=2.0)
    tuning._tune_all(ASKED, {"wgmma": [GEMM] * 3, "triton": [GEMM]})
    # Two of eight seconds are gone when the first begins, four when the second does.
    assert calls == [(["wgmma"], 3, 4.5), (["triton"], 1, 4.0)]


def test_one_kernel_s_failure_leaves_the_others_tuned(monkeypatch):
    def fail(asked, give):
        if asked.kernels == ["wgmma"]:
            raise WrongResultError("wrong")

    calls = tuned(monkeypatch, fail)
    with pytest.raises(WrongResultError, match="wrong"):
        tuning._tune_all(ASKED, {"wgmma": [GEMM], "triton": [GEMM]})
    assert [kernels for kernels, _, _ in calls] == [["wgmma"], ["triton"]]


def test_an_interruption_ends_it(monkeypatch):
    def interrupt(*_):
        raise Interrupted("interrupted")

    calls = tuned(monkeypatch, interrupt)
    with pytest.raises(Interrupted):
        tuning._tune_all(ASKED, {"wgmma": [GEMM], "triton": [GEMM]})
    assert len(calls) == 1


def finished(name):
    """A search of a kernel that came to its end."""
    kernel, timing = registry.get_kernel("gemm", name), Timing.of([1.0] * 5)
    default = kernel.default(GEMM.problem, Device.parse("cpu"))
    final = Final(default, timing, timing, timing, False, {}, {})
    target = SearchTarget(GEMM, kernel, Space({}, default, lambda config: None))
    return FinishedSearch(target, None, final, (), True)


@pytest.mark.parametrize("last", [None, WrongResultError("wrong"), Interrupted("interrupted")])
@pytest.mark.parametrize("form", ["json", "csv", "table"])
def test_several_kernels_searches_are_one_result(monkeypatch, capsys, form, last):
    cpu = Device.parse("cpu")

    def tune(asked, give):
        (name,) = asked.kernels
        give([finished(name)], cpu, asked.format)
        if name == "triton" and last is not None:
            raise last

    tuned(monkeypatch, tune)
    asked = dataclasses.replace(ASKED, format=form, device="cpu")
    with pytest.raises(type(last)) if last is not None else contextlib.nullcontext():
        tuning._tune_all(asked, {"wgmma": [GEMM], "triton": [GEMM]})
    out = capsys.readouterr().out
    if form == "json":
        found = json.loads(out)
        assert found["device"] == cpu.label
        assert [one["kernel"] for one in found["searches"]] == ["wgmma", "triton"]
    elif form == "csv":
        assert [one["kernel"] for one in csv.DictReader(io.StringIO(out))] == ["wgmma", "triton"]
    else:
        assert out.count("geometric mean of 2") == out.count("geometric mean") == 1


def test_a_dry_run_s_plans_are_one_document(monkeypatch):
    tuned(monkeypatch, lambda asked, _: terminal.planned([f"tunes {asked.kernels[0]}"]))
    with terminal.speaking(["--json"]) as manner:
        tuning._tune_all(ASKED, {"wgmma": [GEMM], "triton": [GEMM]})
    assert manner.document == {"plan": ["tunes wgmma", "tunes triton"]}


@pytest.mark.gpu
def test_a_gpu_s_searches_are_listed(capsys):
    options = ["--set", "layers=2,batch=2,context=64", "--dry-run"]
    assert execute("train", ["tune", "tiny", *options]) == 0
    listed = capsys.readouterr().out
    assert "gemm/" in listed
    assert "adamw/" in listed
