"""What to convert: times of the shipped rows, SQNR of products, verdicts, and what is printed."""

import csv
import io
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from jetfire.bench import records
from jetfire.cli import execute
from jetfire.core import profiles, registry
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.data import prepare
from jetfire.measure import peaks
from jetfire.models import advice_text, advise, costs, options, sources, sqnr
from jetfire.models.advice import Advice, Advised, chosen, judged, pattern
from jetfire.models.costs import Cost, Measured, Time, cost_of
from jetfire.models.layers import LinearLayer, at_ends
from jetfire.models.problems import problems_of
from jetfire.models.sqnr import Sqnr
from jetfire.nn import convert
from jetfire.ops import int8_gemm, int8_quantize

pytest.importorskip("transformers")
CPU = Device.parse("cpu")
SIZES = "layers=3,width=64,heads=4,kv_heads=2,hidden=96,vocabulary=128,batch=2,context=32"
LLAMA = ["hf:llama-8x2048", "--set", SIZES, "--device", "cpu"]
GEMM = registry.get("gemm")


def layer(m=8192, n=4096, k=1024, **more):
    return LinearLayer("blocks.0.expand", m, n, k, **{"bias": True, **more})


# Problems.


def test_a_converted_layer_asks_for_three_products_and_what_quantises():
    found = problems_of(layer(m=96, n=64, k=32), 32)
    names = [op.name for op, _ in found]
    assert sorted(names) == ["column_sum", "gemm", "gemm", "gemm", *["quantize"] * 3]
    products = [problem for op, problem in found if op.name == "gemm"]
    assert [(p.m, p.n, p.k, p.out) for p in products] == [
        (96, 64, 32, "bf16"),
        (96, 32, 64, "bf16"),
        (64, 32, 96, "fp32"),
    ]
    assert [p.bias for p in products] == [True, False, False]
    rounded = {(p.m, p.n, p.dtype, p.rounding) for op, p in found if op.name == "quantize"}
    assert rounded == {
        (64, 32, "fp32", "nearest"),
        (96, 32, "bf16", "nearest"),
        (96, 64, "bf16", "stochastic"),
    }


def test_a_layer_stored_transposed_makes_its_gradient_so():
    last = [p for op, p in problems_of(layer(96, 64, 32, transposed=True), 32) if op is GEMM][-1]
    assert (last.m, last.n, last.k) == (32, 64, 96)


def test_without_a_bias_nothing_is_summed():
    assert "column_sum" not in {op.name for op, _ in problems_of(layer(bias=False), 128)}


# Times.


def problem(**fields):
    return GEMM.Problem(**{"m": 8192, "n": 4096, "k": 1024, "block": 128, **fields})


def test_a_shipped_row_is_of_the_very_shape():
    times = costs.shipped()
    rows = records.rows()["NVIDIA H200"].by_problem()
    row = rows["gemm", problem()]
    found = times.time(GEMM, problem())
    assert (found.ms, found.bf16) == (row.ms, row.peers["cublas_bf16"])
    assert found.fp8 == row.peers["fp8_scaled_mm_block"]
    assert times.time(GEMM, problem(bias=True)) == found  # a flag
    assert times.time(GEMM, problem(m=8191)) is None
    assert times.time(GEMM, problem(block=64)).ms > found.ms
    assert times.source == "shipped rows of NVIDIA H200"


def test_where_no_row_is_a_tuned_profile_tells(shipped):
    op = registry.get("column_sum")
    rows, times = records.rows()["NVIDIA H200"].by_problem(), costs.shipped()
    tuned = profiles.read(shipped / "nvidia-h200" / "column_sum.json")
    by_problem = {}
    for entry in tuned:
        by_problem.setdefault(op.Problem.parse(entry.problem), []).append(entry.ms)
    told = {asked: ms for asked, ms in by_problem.items() if (op.name, asked) not in rows}
    assert len(told) > 9
    assert all(times.time(op, asked).ms == min(ms) for asked, ms in told.items())


class _Known:
    """Times that a test knows: of a product m·n·k ns, of the rest 1 ms; of block 64 nothing."""

    source = "a test"

    def time(self, op, problem):
        if problem.block == 64:
            return None
        if not op.flops(problem):
            return Time(1.0, {})
        ms = problem.m * problem.n * problem.k / 1e6 * (32 / problem.block)
        return Time(ms, {"cublas_bf16": 3.0, "fp8_scaled_mm": 2.0, "fp8_scaled_mm_block": 1.5})


def test_a_cost_is_the_sum_of_its_launches():
    one = layer(m=128, n=64, k=32, calls=2)
    cost = cost_of(problems_of(one, 128), one.calls, _Known())
    assert cost.products == pytest.approx(2 * 3 * 128 * 64 * 32 / 1e6 / 4)
    assert (cost.rest, cost.bf16, cost.fp8, cost.launches) == (8.0, 18.0, 9.0, 7)
    assert cost.total == cost.products + 8.0
    lacking = cost_of(problems_of(one, 64), one.calls, _Known())
    assert (lacking.products, lacking.total, lacking.bf16, len(lacking.missing)) == (
        None,
        None,
        None,
        7,
    )
    assert any(text.startswith("gemm m=128 n=64 k=32 block=64") for text in lacking.missing)


def test_a_gpu_s_times_are_measured_once_of_the_kernel_in_use(monkeypatch):
    rates = {"copy_gbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0}
    monkeypatch.setattr(peaks, "cached", lambda *_: rates)
    monkeypatch.setattr(costs, "_ROUNDS", 3)
    times = Measured(CPU, seed=0, debug=False)
    asked = []
    usual = times.runner.measure
    monkeypatch.setattr(
        times.runner, "measure", lambda case, chosen: asked.append(chosen) or usual(case, chosen)
    )
    small = problem(m=64, n=32, k=64, block=32)
    found = times.time(GEMM, small)
    assert found.ms > 0
    assert found.bf16 is None  # the CPU has other peers
    assert times.time(GEMM, small) is found
    assert [len(one.kernels) for one in asked] == [1]
    times.measure([(GEMM, small), (GEMM, problem(m=32, n=32, k=32, block=32))] * 2)
    assert len(asked) == 2


def test_what_no_kernel_takes_is_not_known(monkeypatch, capsys):
    def none_takes(*_):
        raise UsageError("no kernel of gemm takes m=1")

    monkeypatch.setattr(costs, "choose", none_takes)
    monkeypatch.setattr(costs, "cached", lambda *_: {})
    monkeypatch.setattr(costs, "Runner", lambda *_: None)
    assert Measured(CPU, seed=0, debug=False).time(GEMM, problem()) is None
    assert capsys.readouterr().err == "jetfire: no kernel of gemm takes m=1\n"


# SQNR.


def test_sqnr_is_that_of_the_kernels_products():
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((96, 64), (48, 64), (96, 48)))
    found = sqnr.of_products(x, w, g, {"int8-block32": 32})
    a, b = (int8_quantize(t, block=32, layout="both") for t in (x, w))
    seed = torch.zeros(1, dtype=torch.int64)
    d = int8_quantize(g, block=32, layout="both", rounding="stochastic", seed=seed)
    ours = found["int8-block32"]
    pairs = {"y": (a, b, x @ w.t()), "dx": (d, b.t, g @ w), "dw": (d.t, a.t, g.t() @ x)}
    for name, (left, right, exact) in pairs.items():
        error = (int8_gemm(left, right, out="fp32") - exact).norm() / exact.norm()
        assert getattr(ours, name) == pytest.approx(-20 * math.log10(error), abs=0.01)
    assert ours.least == getattr(ours, ours.worst) == min(ours.y, ours.dx, ours.dw)
    for name in sqnr.FP8:  # 3 bits of mantissa
        assert 26 < found[name].least < ours.least


def test_small_weights_of_large_features_are_lost_in_large_blocks():
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn((128, 128), generator=generator) for _ in range(3))
    x[:, :32] *= 100
    w[:, :32] /= 100
    found = sqnr.of_products(x, w, g, {"32": 32, "128": 128})
    assert found["32"].y > 35
    assert found["128"].y < 10
    assert found["fp8_rowwise"].y > 25  # floats


def test_sqnr_of_what_is_exact_or_not_finite():
    ones, zeros = torch.ones(32, 32), torch.zeros(32, 32)
    exact = sqnr.of_products(ones, ones, zeros, {"a": 32})["a"]
    assert (exact.dx, exact.dw) == (sqnr.MOST, sqnr.MOST)
    ones[0, 0] = torch.nan
    assert sqnr.of_products(ones, zeros, zeros, {"a": 32})["a"].y == -sqnr.MOST


def test_the_operands_are_those_of_the_model_s_own_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
    x = torch.randn(64, 32)
    taken = {}
    handles = [
        model[i].register_full_backward_hook(lambda _, gx, gy, i=i: taken.update({i: gy[0]}))
        for i in (0, 2)
    ]
    (model(x) ** 2).mean().backward()
    for handle in handles:
        handle.remove()
    found = sqnr.of_layers(model, lambda net: (net(x) ** 2).mean(), ["0", "2"], {"b": 32})
    hidden = torch.relu(model[0](x)).detach()
    for name, rows in (("0", x), ("2", hidden)):
        expected = sqnr.of_products(rows, model[int(name)].weight, taken[int(name)], {"b": 32})
        assert vars(found[name]["b"]) == pytest.approx(vars(expected["b"]), abs=1e-3)
    part = sqnr.of_layers(model, lambda net: (net(x) ** 2).mean(), ["0"], {"b": 32}, most=16)
    assert vars(part["0"]["b"]) != pytest.approx(vars(found["0"]["b"]), abs=1e-3)


# Verdicts.

FAST = Cost(1.0, 0.5, 3.0, 2.0, 7, ())
SLOW = Cost(2.0, 2.0, 3.0, 2.0, 7, ())
NONE = Cost(None, None, None, None, 7, ("gemm m=1", "quantize m=1"))
NO_BF16 = Cost(1.0, 0.5, None, None, 7, ())
EXACT, NOISY = Sqnr(30.0, 30.0, 30.0), Sqnr(30.0, 30.0, 12.5)


@pytest.mark.parametrize(
    ("cost", "exact", "kept", "convert", "why"),
    [
        (FAST, EXACT, "", True, "2.00× BF16"),
        (FAST, None, "", True, "2.00× BF16"),
        (FAST, NOISY, "", False, "SQNR of dw 12.5 dB"),
        (SLOW, EXACT, "", False, "0.75× BF16"),
        (NONE, EXACT, "", None, "no row of 2 of 7 launches"),
        (NO_BF16, EXACT, "", None, "no row of BF16"),
        (FAST, EXACT, "the output head", False, "the output head"),
    ],
)
def test_a_layer_is_converted_where_it_gains_and_is_exact(cost, exact, kept, convert, why):
    known = {} if exact is None else {"int8-block128": exact}
    found = judged(Advice(layer(kept=kept), {"int8-block128": cost}, known), "int8-block128", 20.0)
    assert (found.convert, found.why) == (convert, why)


def test_the_recipe_is_the_one_that_gains_most():
    names = ["int8-block32", "int8-block128"]
    advice = Advice(layer(), {"int8-block32": SLOW, "int8-block128": FAST}, {})
    assert chosen([advice], names, 20.0) == "int8-block128"
    both = replace(advice, costs={"int8-block32": FAST, "int8-block128": FAST})
    noisy = replace(both, sqnr={"int8-block32": EXACT, "int8-block128": NOISY})
    assert chosen([noisy], names, 20.0) == "int8-block32"
    unknown = replace(advice, costs={"int8-block32": NONE, "int8-block128": SLOW})
    assert chosen([unknown], names, 20.0) == "int8-block128"
    assert advice.cost("int8-block128") is FAST
    mended = replace(advice, costs={"int8-block32": NO_BF16, "int8-block128": FAST})
    assert mended.cost("int8-block32") == replace(NO_BF16, bf16=3.0, fp8=2.0)


def test_the_layers_gains_predict_the_step():
    name = "int8-block128"
    verdicts = [
        judged(Advice(replace(layer(), name=f"blocks.{i}.x", kept=kept), {name: cost}, {}), name, 0)
        for i, (cost, kept) in enumerate(((FAST, ""), (SLOW, ""), (FAST, "a head"), (NONE, "")))
    ]
    found = Advised({}, "", "", name, verdicts, {}, "compile", step_ms=20.0)
    assert (len(found.known), found.bf16_ms, found.advised_ms) == (3, 9.0, 1.5 + 3.0 + 3.0)
    assert found.predicted_ms == 18.5
    assert found.skip == ["blocks.1.x"]


def test_the_call_is_whole_and_leaves_what_is_to_stay(capsys):
    """Repeated layers as one pattern, but where that would match a layer that is to be replaced."""
    name, parts = "int8-block128", ("down", "mixed", "up")
    blocks = [nn.ModuleDict({part: nn.Linear(64, 64) for part in parts}) for _ in range(8)]
    model = nn.ModuleDict({"h": nn.ModuleList(blocks)})
    slow = [f"h.{i}.down" for i in range(8)] + [f"h.{i}.mixed" for i in (1, 3)]
    layers = [one for one, module in model.named_modules() if isinstance(module, nn.Linear)]
    costs_of = {one: {name: SLOW if one in slow else FAST} for one in layers}
    advices = [Advice(replace(layer(), name=one), costs_of[one], {}) for one in layers]
    verdicts = [judged(advice, name, 20.0) for advice in advices]
    advice_text.show(Advised({}, "", "", name, verdicts, {}), [name], "table")
    call = capsys.readouterr().out.splitlines()[-1].removesuffix(": 14 layers gain")
    assert call == f'convert(model, "{name}", keep=["h.*.down", "h.1.mixed", "h.3.mixed"])'
    left = eval(call, {"convert": convert, "model": model}).left
    assert sorted(left) == sorted(slow)


def test_numbered_names():
    assert pattern("a.0.b.12.c3") == "a.*.b.*.c3"
    assert pattern("0.weight") == "*.weight"
    names = ["e", "h.0.a", "h.1.a", "h.2.a", "h.2.x.0.b", "h.2.x.1.b", "h.2.x.2.b"]
    assert at_ends(names) == ["e", "h.0.a", "h.2.a", "h.2.x.0.b", "h.2.x.2.b"]


# The command.


def said(capsys, *words):
    assert execute("advise", list(words)) == 0
    return capsys.readouterr()


def test_without_a_gpu_it_says_what_rows_tell_and_no_more(capsys):
    found = json.loads(said(capsys, *LLAMA, "--format", "json").out)
    assert found["times"] == "shipped rows of NVIDIA H200"
    assert found["model"]["layers"] == 3
    assert found["sqnr_of"].startswith("1×32 random tokens in 2 layers, at most 1024 features")
    assert found["totals"]["known"] == 0
    assert found["totals"]["step_ms"] is None
    *layers, head = found["layers"]
    assert len(layers) == 3 * 7
    assert (head["name"], head["verdict"], head["why"]) == ("lm_head", "keep", "the output head")
    for one in layers:
        assert (one["verdict"], one["bf16_ms"], one["fp8_ms"]) == ("unknown", None, None)
        assert "gemm m=64 " in " ".join(one["int8"]["int8-block64"]["missing"])
        assert set(one["sqnr_db"]) == {*options.ADVISED, *sqnr.FP8}
        assert all(20 < db < 60 for s in one["sqnr_db"].values() for db in s.values())


def test_a_shape_with_rows_has_times_and_a_verdict(capsys, shipped):
    words = ["hf:gpt2-350m", "--set", "layers=1", "--device", "cpu", "--no-sqnr"]
    out = said(capsys, *words, "--format", "json").out
    found = json.loads(out)
    by_name = {one["name"].rpartition("h.0.")[2]: one for one in found["layers"]}
    one = by_name["mlp.c_proj"]
    times = costs.shipped()
    layers = advise.traced(sources.parse("hf:gpt2-350m", {"layers": "1"})).layers
    real = next(one for one in layers if one.name.endswith("mlp.c_proj"))
    cost = cost_of(problems_of(real, 128), 1, times)
    assert one["int8"]["int8-block128"]["products_ms"] == pytest.approx(cost.products, rel=1e-3)
    assert one["bf16_ms"] == pytest.approx(cost.bf16, rel=1e-3)
    faster = cost.bf16 > cost.total
    assert one["verdict"] == ("convert" if faster else "keep")
    table = said(capsys, *words).out
    assert "transformer.h.0.mlp.c_proj" in table
    assert f"{cost.bf16 / cost.total:.2f}× BF16" in " ".join(table.split())
    assert 'convert(model, "int8-block128"' in table or "convert nothing" in table


def test_a_spreadsheet_has_a_line_for_each_layer(capsys):
    out = said(capsys, *LLAMA, "--no-sqnr", "--recipe", "int8-block64", "--format", "csv").out
    lines = list(csv.DictReader(io.StringIO(out)))
    assert len(lines) == 22
    assert lines[0]["name"] == "model.layers.0.self_attn.q_proj"
    assert "int8-block64.products_ms" in lines[0]
    assert not any("sqnr" in name or "block128" in name for name in lines[0])


def test_a_preset_and_prepared_tokens(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 400)
    folder = prepare.prepare(str(text), "byte", tmp_path / "tokens")
    given = ["tiny", "--set", "batch=1,layers=1", "--device", "cpu", "--data", str(folder)]
    found = json.loads(said(capsys, *given, "--format", "json").out)
    assert found["sqnr_of"].startswith("1×64 tokens of tokens in 1 layers")
    assert [one["name"] for one in found["layers"]] == [
        "blocks.0.qkv",
        "blocks.0.projection",
        "blocks.0.expand",
        "blocks.0.contract",
    ]
    words = ["hf:gpt2-124m", "--set", "vocabulary=64,layers=1", "--device", "cpu"]
    assert execute("advise", [*words, "--data", str(folder)]) == 2
    assert "expected at most the model's, 64" in capsys.readouterr().err


OWN = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 31), nn.Bilinear(1, 1, 1))
    return model[:3], lambda net: net(torch.randn(16, 32)).square().mean()

def inplace():
    body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))
    return body, lambda net: net(torch.randn(16, 32)).square().mean()

def backward_fails():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no way back")

    return nn.Sequential(nn.Linear(32, 32)), lambda net: Fails.apply(net(torch.ones(4, 32))).sum()

def none():
    return nn.Sequential(nn.GELU()), lambda net: net(torch.randn(4)).mean()
"""


def test_a_user_s_own_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = json.loads(said(capsys, "mine:make", "--device", "cpu", "--format", "json").out)
    assert [(one["m"], one["n"], one["k"]) for one in found["layers"]] == [
        (16, 64, 32),
        (16, 31, 64),
    ]
    assert found["sqnr_of"] == "its own batch, at most 1024 features of an operand"
    assert all(one["sqnr_db"] for one in found["layers"])
    found = json.loads(said(capsys, "mine:inplace", "--device", "cpu", "--format", "json").out)
    assert all(one["sqnr_db"] for one in found["layers"])
    assert execute("advise", ["mine:backward_fails", "--device", "cpu"]) == 2
    says = "mine:backward_fails: its step fails: RuntimeError: no way back"
    assert says in capsys.readouterr().err
    assert execute("advise", ["mine:none", "--device", "cpu"]) == 2
    assert "mine:none: it calls no linear layer" in capsys.readouterr().err
    assert execute("advise", ["mine:make", "--device", "cpu", "--data", str(tmp_path)]) == 2
    assert "mine:make has its own batch: leave out --data" in capsys.readouterr().err
    sys.modules.pop("mine", None)


def test_where_memory_is_short_sqnr_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(advise, "memory_free", lambda device: 1000)
    captured = said(capsys, *LLAMA)
    assert "SQNR left out: hf:llama-8x2048 needs about" in captured.err
    assert "SQNR is" not in captured.out


def test_with_a_gpu_it_measures_and_predicts_the_step(monkeypatch, capsys):
    """Times that a test knows stand for the GPU's."""

    class Known(_Known):
        def __init__(self, *_):
            self.asked = 0

        def measure(self, problems):
            assert len({(op.name, problem) for op, problem in problems}) > 9

    gpu = replace(CPU, kind="cuda", name="A GPU")
    monkeypatch.setattr(advise, "Measured", Known)
    monkeypatch.setattr(advise.Device, "parse", lambda text: gpu)
    monkeypatch.setattr(advise, "memory_free", lambda device: None)
    monkeypatch.setattr(Device, "torch_device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(advise, "_step", lambda *_: 1000.0)
    words = ["hf:llama-8x2048", "--set", SIZES, "--recipe", "int8-block32,int8-block128"]
    found = json.loads(said(capsys, *words, "--format", "json").out)
    assert (found["times"], found["recipe"]) == ("a test", "int8-block128")
    assert found["sqnr_of"] == "2×32 random tokens"
    totals = found["totals"]
    assert (totals["known"], totals["bf16_ms"], totals["run"]) == (22, 22 * 9.0, "compile")
    converted = [one for one in found["layers"] if one["verdict"] == "convert"]
    assert [one["name"] for one in found["layers"] if one not in converted] == ["lm_head"]
    gain = sum(
        9.0 - sum(one["int8"]["int8-block128"][k] for k in ("products_ms", "rest_ms"))
        for one in converted
    )
    assert totals["predicted_step_ms"] == pytest.approx(1000 - gain, rel=1e-3)
    table = said(capsys, *words).out
    assert f"predicted step, run compile: 1000.00 → {1000 - gain:.2f} ms" in table
    assert 'convert(model, "int8-block128"): 21 layers gain' in table


def test_a_step_is_timed_as_its_run_says():
    source = sources.parse("hf:llama-8x2048", dict(t.split("=") for t in SIZES.split(",")))
    ms = advise._step(source, "eager", CPU, options.AdviseOptions("hf:llama-8x2048"))
    assert ms > 0


def test_a_step_that_fails_is_left_out(monkeypatch, capsys):
    class Fails:
        def __init__(self, *_):
            raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(advise, "ModelSubject", Fails)
    source = sources.parse("hf:gpt2-124m", {})
    assert advise._step(source, None, CPU, options.AdviseOptions("hf:gpt2-124m")) is None
    assert capsys.readouterr().err == "jetfire: step left out: RuntimeError: no such kernel\n"


@pytest.mark.gpu
def test_the_whole_way_on_the_gpu(capsys):
    words = ["hf:llama-8x2048", "--set", SIZES.replace("width=64", "width=256"), "--format", "json"]
    found = json.loads(said(capsys, *words, "--recipe", "int8-block128").out)
    assert found["times"].startswith("measured on ")
    assert found["totals"]["known"] >= 21
    assert found["totals"]["step_ms"] > 0
    assert found["totals"]["predicted_step_ms"] is not None
    assert {one["verdict"] for one in found["layers"]} <= {"convert", "keep"}
