"""Training steps of models that are not ours: named, of a config.json, of the user's function."""

import json
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import nn

from jetfire.cli import execute
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.bench.cases import EAGER
from jetfire.measure import peaks
from jetfire.measure.results import Results, Row
from jetfire.models import bench, cases, layers, sources, subject
from jetfire.models.bench import ModelBench
from jetfire.models.subject import ModelSubject
from jetfire.nn import FrozenInt8Linear
from jetfire.report import documents
from jetfire.report import training as training_report
from jetfire.tests.language_models import attends_causally, compiled

transformers = pytest.importorskip("transformers")
CPU = Device.parse("cpu")
HERE = torch.device("cpu")
TINY = {
    "layers": "2",
    "width": "32",
    "heads": "2",
    "vocabulary": "64",
    "batch": "2",
    "context": "16",
}
GQA = {**TINY, "heads": "4", "kv_heads": "2", "hidden": "48"}
PEAKS = {"copy_gbps": 1.0, "int8_tops": 1.0, "bf16_tflops": 1.0}
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32))

    def forward(self, x):
        return self.body(x).square().mean()

def named():
    class Wrapped(Net):
        def forward(self, x):
            return {"loss": super().forward(x)}
    return Wrapped(), {"x": torch.randn(4, 32)}

def closure():
    x = torch.randn(4, 32)
    return Net(), lambda model: model(x)

def no_loss():
    return Net().body, torch.randn(4, 32)

def arguments():
    return Net(), (torch.randn(4, 32),)

def fails():
    raise OSError("no data\\nat all")

def nothing():
    return Net()

number = 3
drawn = torch.randn(3)  # what an import draws must not move what a variant draws
"""


def words(changes):
    return [f"{name}={value}" for name, value in changes.items()]


def measure(word, changes, recipes=("int8",)):
    notes: list[str] = []
    made = ModelBench(CPU, notes.append, rounds=2, sample_ms=0.01)
    return made.measure(bench.case_of(word, words(changes), recipes, CPU)), notes


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the current folder."""
    (tmp_path / "ownmodel.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("ownmodel", None)


@pytest.mark.parametrize(("word", "changes"), [("hf:gpt2-350m", TINY), ("hf:llama-8x2048", GQA)])
def test_a_converted_model_is_timed_beside_bf16(word, changes, tmp_path):
    (row, eager), notes = measure(word, changes)
    assert (row.op, row.kernel, row.role, row.ok) == ("model_step", "int8", "kernel", True), notes
    sizes = {name: int(value) for name, value in changes.items()}
    assert row.problem == {"model": word, **sizes, "run": "eager"}
    assert row.vs_peer == {"eager": eager.ms / row.ms}
    assert 1e-3 < row.rel_err < 0.2
    assert row.extra["tokens_per_s"] == pytest.approx(32 / row.ms * 1e3)
    assert not notes
    file = tmp_path / "r.json"
    file.write_text(Results({}, [row]).to_json())
    assert [again.key() for again in Results.load(file).rows] == [row.key()]


@pytest.mark.parametrize(("word", "changes"), [("hf:gpt2-350m", TINY), ("hf:llama-8x2048", GQA)])
def test_adapters_are_timed_on_frozen_layers(word, changes):
    """Of both factors of each adapter there is a gradient, and of nothing else."""
    pytest.importorskip("peft")
    plain = bench.case_of(word, words(changes), ["int8"], CPU)
    (row, eager), notes = measure(word, {**changes, "adapters": "4"})
    assert (row.kernel, row.ok, row.problem["adapters"]) == ("int8", True, 4), notes
    assert row.vs_peer == {"eager": eager.ms / row.ms}
    assert 1e-3 < row.rel_err < 0.2
    case = bench.case_of(word, words({**changes, "adapters": "4"}), ["int8"], CPU)
    assert case.flops == pytest.approx(plain.flops * 2 / 3)
    for name in ("int8", "eager"):
        subject = ModelSubject(case, name, HERE, 0)
        frozen = [m for m in subject.model.modules() if isinstance(m, FrozenInt8Linear)]
        assert len(frozen) == (len(case.layers) if name == "int8" else 0)
        found = {grad.rpartition(".lora_")[2] for grad in subject.first()}
        assert found == {"loss", "A.default.weight", "B.default.weight"}


def test_blocks_of_gpt2_are_fused():
    (row, eager), notes = measure("hf:gpt2-124m", TINY, ["int8-block32-fused"])
    assert (row.kernel, row.ok) == ("int8-block32-fused", True), notes
    assert row.vs_peer == {"eager": eager.ms / row.ms}


def test_a_model_none_of_whose_blocks_can_be_fused_says_so():
    with pytest.raises(
        UsageError, match="no block is fused: 32 outputs: expected a multiple of 128"
    ):
        ModelSubject(
            bench.case_of("hf:llama-8x2048", words(GQA), ["int8-fused"], CPU), "int8-fused", HERE, 0
        )
    with pytest.raises(UsageError, match="--recipe int4-hq-fused"):
        bench.case_of("hf:gpt2-124m", words(TINY), ["int4-hq-fused"], CPU)


def test_a_recipe_in_4_bits_may_be_noisy():
    (row, _), notes = measure("hf:llama-8x2048", GQA, ["int4-hq-lss"])
    assert row.ok, notes
    assert row.extra["noise"] > 0.2 > 0


def test_only_the_products_of_linear_layers_are_counted():
    found = layers.traced(sources.parse("hf:gpt2-124m", TINY))
    block = 12 * 32 * 32
    assert found.flops == 6 * 32 * (2 * block + 64 * 32)
    assert [layer.kept for layer in found.layers] == [""] * 8 + ["the output head"]
    first = found.layers[0]
    assert (first.name, first.m, first.n, first.k) == ("transformer.h.0.attn.c_attn", 32, 96, 32)
    assert found.left == {}


def test_a_large_model_is_traced_without_memory():
    found = layers.traced(sources.parse("hf:llama-4x4096", {}))
    assert len(found.layers) == 29
    assert found.parameters == 1071681536


class _HalfUnwritten(ModelSubject):
    def first(self):
        found = super().first()
        if self.variant.name != EAGER or any(
            "Int8" in type(m).__name__ for m in self.model.modules()
        ):
            found["transformer.h.1.mlp.c_fc.weight"][:, 16:] = 0
        return found


class _NeverLearns(ModelSubject):
    def call(self):
        return torch.tensor(self.loss)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (_HalfUnwritten, "transformer.h.1.mlp.c_fc.weight: relative error"),
        (_NeverLearns, "the loss of the one batch went from 4."),
    ],
)
def test_a_wrong_recipe_is_not_timed(made, says, monkeypatch):
    monkeypatch.setattr(bench, "ModelSubject", made)
    (row, _), notes = measure("hf:gpt2-124m", TINY)
    assert row.ok is False
    assert row.ms is None
    assert row.error.startswith(says)
    assert any(says in note for note in notes)


def test_every_variant_begins_with_the_same_parameters_and_batch():
    case = bench.case_of("hf:llama-8x2048", words(GQA), ["int8"], CPU)
    ours, theirs = (ModelSubject(case, name, HERE, 3) for name in ("int8", EAGER))
    assert torch.equal(ours.batch["input_ids"], theirs.batch["input_ids"])
    ours, theirs = ours.model.state_dict(), theirs.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_module_may_draw_as_it_is_imported(own):
    """It is imported for the first variant alone, which had other parameters than the rest."""
    case = bench.case_of("ownmodel:closure", [], ["int8"], CPU)
    sys.modules.pop("ownmodel", None)
    ours, theirs = (ModelSubject(case, name, HERE, 3).model for name in ("int8", EAGER))
    assert torch.equal(ours.body[0].weight, theirs.body[0].weight)


def test_a_recipe_that_fails_is_wrong_all_the_same(monkeypatch):
    """What a step refuses is no recipe that cannot be applied: it may be a fault of ours."""

    class Refusing(ModelSubject):
        def first(self):
            if self.recipe:
                raise UsageError("rows=3: expected a multiple of 4")
            return super().first()

    monkeypatch.setattr(bench, "ModelSubject", Refusing)
    (row, _), _ = measure("hf:gpt2-124m", TINY)
    assert (row.kernel, row.ok) == ("int8", False)
    assert "rows=3" in row.error


def test_the_gradients_compared_are_of_the_ends():
    case = bench.case_of("hf:gpt2-124m", words({**TINY, "layers": "3"}), ["int8"], CPU)
    names = ModelSubject(case, EAGER, HERE, 0).first().keys()
    assert {
        "loss",
        "transformer.wte.weight",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.2.mlp.c_fc.weight",
    } <= names
    assert not any(".h.1." in name for name in names)


def test_a_step_is_compiled_as_its_run_says(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: asked.append(mode) or model)
    for run in cases.RUNS.keys() - {cases.GRAPH}:
        case = bench.case_of("hf:gpt2-124m", [*words(TINY), f"run={run}"], ["int8"], CPU)
        made = ModelSubject(case, "int8", HERE, 0)
        assert (made.variant.name, made.counts) == (run, run != "reduce_overhead")
        made.call()
    assert {*asked} == {None, "reduce-overhead"}
    for peer in ("compile", "reduce_overhead"):  # whatever the recipe's own run
        assert ModelSubject(case, peer, HERE, 0).variant is cases.PEERS[peer]


def test_a_cpu_has_no_graph_of_a_step():
    with pytest.raises(UsageError, match=r"^--set run=graph: expected a CUDA device, not cpu$"):
        bench.case_of("hf:gpt2-124m", [*words(TINY), "run=graph"], ["int8"], CPU)


@pytest.mark.parametrize(("word", "changes"), [("hf:gpt2-124m", TINY), ("hf:llama-8x2048", GQA)])
@pytest.mark.parametrize("name", ["int8", EAGER])
def test_a_model_s_forward_is_one_graph(word, changes, name):
    case = bench.case_of(word, words({**changes, "layers": "1"}), ["int8"], CPU)
    made = ModelSubject(case, name, HERE, 0)
    torch._dynamo.reset()
    found = torch._dynamo.explain(made.model)(**made.batch)
    torch._dynamo.reset()
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_the_same_step_under_torch_compile(monkeypatch):
    """Traced whole and run by the eager backend: no compiler is needed."""
    usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: usual(model, backend="aot_eager"))
    (row, _), notes = measure("hf:llama-8x2048", {**GQA, "layers": "1", "run": "compile"})
    assert row.ok, notes
    assert row.problem["run"] == "compile"


@pytest.mark.parametrize(("name", "causal"), [("compile", False), ("compile_causal", True)])
@pytest.mark.parametrize(("word", "sizes"), [("hf:llama-8x2048", GQA), ("hf:gpt2-350m", TINY)])
def test_a_peer_attends_as_fused_models_do(word, sizes, name, causal):
    case = bench.case_of(word, words({**sizes, "layers": "1"}), ["int8"], CPU)
    made, plain = (ModelSubject(case, one, HERE, 0) for one in (name, "eager"))
    graphs = compiled(made.model)
    made.forward = made.model
    loss = made.first()["loss"]
    assert attends_causally(graphs) == causal
    assert float(loss) == pytest.approx(float(plain.first()["loss"]), rel=1e-3)


@pytest.mark.parametrize(("word", "sizes"), [("hf:llama-8x2048", GQA), ("hf:gpt2-350m", TINY)])
def test_adapters_attend_as_fused_models_do(word, sizes):
    """A peer as well, so that INT8's own gain shows."""
    pytest.importorskip("peft")
    case = bench.case_of(word, words({**sizes, "layers": "1", "adapters": "4"}), ["int8"], CPU)
    causal = {}
    for name in ("int8", "compile", "compile_causal"):
        made = ModelSubject(case, name, HERE, 0)
        graphs = compiled(made.model)
        made.forward = made.model
        made.first()
        causal[name] = attends_causally(graphs)
    assert causal == {"int8": True, "compile": False, "compile_causal": True}
    assert "compile_causal" in cases.ADAPTED_PEERS


@pytest.mark.parametrize("function", ["named", "closure", "arguments"])
def test_a_user_s_function_gives_model_and_batch(function, own):
    (row, eager), notes = measure(f"ownmodel:{function}", {})
    assert row.ok, (row.error, notes)
    assert row.problem == {"model": f"ownmodel:{function}", "run": "eager"}
    assert row.tflops * row.ms == pytest.approx(6 * 4 * 2 * 32 * 64 / 1e9)
    assert eager.role == "peer"


def test_a_recipe_that_cannot_be_applied_is_left_out(own, capsys):
    """It is no wrong result; where it is the only one, the command was asked for what cannot be."""
    small = ["bench", "ownmodel:closure", "--device", "cpu", "--rounds", "2", "--recipe"]
    says = "ownmodel:closure with int8-fused: no block is fused: it has none of transformers'"
    assert execute("train", [*small, "int8-fused"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"jetfire: {says}")
    assert execute("train", [*small, "int8-fused,int8", "--format", "json"]) == 0
    found = capsys.readouterr()
    assert f"int8-fused left out: {says}" in found.err
    assert [row["kernel"] for row in json.loads(found.out)["rows"]] == ["int8", "eager"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("kv_heads=3", "--set kv_heads=3: expected a divisor of heads=32"),
        ("width=96", "--set width=96,heads=32: expected an even size of a head, not 3"),
        ("width=130,heads=4", "The hidden size (130) is not a multiple of the number of attention"),
    ],
)
def test_sizes_of_heads_that_do_not_fit_are_refused(sizes, says, capsys):
    sizes = f"layers=1,hidden=48,vocabulary=64,batch=1,context=8,{sizes}"
    assert execute("train", ["bench", "hf:llama-4x4096", "--device", "cpu", "--set", sizes]) == 2
    assert says in capsys.readouterr().err


def test_a_config_whose_sizes_do_not_fit_may_be_given_others(tmp_path):
    file = tmp_path / "config.json"
    llama = {"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": 48}
    file.write_text(json.dumps({**llama, "hidden_size": 130, "num_attention_heads": 4}))
    assert sources.parse(str(file), {"width": "128"}).fields()["width"] == 128


def test_heads_of_keys_are_as_many_as_heads_where_they_were():
    """Of a config whose keys have fewer, only `kv_heads` changes them."""
    assert sources.parse("hf:llama-4x4096", {"heads": "4"}).fields()["kv_heads"] == 4
    assert sources.parse("hf:llama-8x2048", {"heads": "16"}).fields()["kv_heads"] == 8


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("ownmodel:fails", "ownmodel:fails: OSError: no data"),
        ("ownmodel:nothing", "ownmodel:nothing returned Net: expected a torch.nn.Module and a"),
        ("ownmodel:number", "ownmodel:number: expected a function number in ownmodel"),
        ("ownmodel:nope", "ownmodel:nope: expected a function nope in ownmodel"),
        ("nomodel:make", "nomodel:make: ModuleNotFoundError: No module named 'nomodel'"),
        ("ownmodel:no_loss", "the model returned Tensor of shape (4, 32): expected a loss"),
    ],
)
def test_what_is_wrong_with_a_user_s_function_is_said(word, says, own, capsys):
    assert execute("train", ["bench", word, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_a_config_runs_no_code_and_loads_nothing(tmp_path):
    file = tmp_path / "config.json"
    foreign = {
        "auto_map": {"AutoConfig": "evil.Config"},
        "_attn_implementation": "who/kernels",
        "quantization_config": {"quant_method": "bitsandbytes"},
        "torch_dtype": "bfloat16",
        "_name_or_path": "who/what",
    }
    file.write_text(json.dumps({**CONFIG, **foreign}))
    source = sources.parse(str(file), {"batch": "2", "context": "8", "width": "16"})
    model, batch = source.make(HERE)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.model.layers[0].mlp.down_proj.weight.shape == (16, 48)
    assert batch["input_ids"].shape == (2, 8)
    assert source.fields()["model"] == "config.json"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "t5"}, "model_type='t5': expected that of a causal language model"),
        ({"model_type": "qwen22"}, "model_type='qwen22' (did you mean qwen2?)"),
        ({}, "model_type is missing"),
        ([], "expected a JSON object"),
        ({**CONFIG, "num_hidden_layers": 5000}, "num_hidden_layers=5000: expected less than or"),
        ({**CONFIG, "hidden_size": "x"}, "hidden_size='x': expected an integer"),
        ({**CONFIG, "hidden_size": 2**40}, "hidden_size=1099511627776: expected less than or"),
        ({**CONFIG, "hidden_size": 30}, "config.json: its step fails: RuntimeError: "),
    ],
)
def test_a_wrong_config_is_refused(content, says, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    small = ["--set", "batch=1,context=8", "--device", "cpu"]
    assert execute("train", ["bench", str(file), *small]) == 2
    assert says in capsys.readouterr().err


def test_the_command_saves_rows_and_says_itself_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    file = tmp_path / "r.json"
    given = ["hf:gpt2-124m", "--set", ",".join(words(TINY)), "--rounds", "2", "-o", str(file)]
    assert execute("train", ["bench", *given, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "model_step model=hf:gpt2-124m layers=2" in said
    assert "jetfire train bench hf:gpt2-124m --recipe int8 --set layers=2" in said
    assert [row.kernel for row in Results.load(file).rows] == ["int8", "eager"]


@pytest.mark.parametrize(("given", "chosen"), [([], None), (["--peer", "none"], [EAGER])])
def test_the_command_says_whether_peers_were_named(given, chosen, monkeypatch):
    """Where none was, a case leaves out one of the two that keep a step's memory."""
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    asked = []
    monkeypatch.setattr(ModelBench, "measure", lambda self, _: asked.append(self.chosen) or [])
    words_given = ["bench", "hf:gpt2-124m", "--set", ",".join(words(TINY)), "--device", "cpu"]
    assert execute("train", [*words_given, *given]) == 2  # nothing was measured
    assert asked == [chosen]


def test_a_cpu_is_spared_what_is_for_a_gpu(capsys):
    assert execute("train", ["bench", "hf:llama-4x4096", "--device", "cpu"]) == 5
    assert "model_step model=hf:llama-4x4096 layers=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "chosen", "left"),
    [
        ("compile", None, {"graph"}),
        ("graph", None, {"reduce_overhead"}),
        ("compile", ("graph", "reduce_overhead"), {"compile", "fp8_tensorwise", "fp8_rowwise"}),
    ],
)
def test_one_peer_keeps_a_step_s_memory_unless_both_are_named(run, chosen, left):
    made = ModelBench(CPU, print, rounds=3, chosen=chosen)
    made.peers = [name for name in cases.PEERS if chosen is None or name in (EAGER, *chosen)]
    case = replace(bench.case_of("hf:gpt2-124m", words(TINY), ["int8"], CPU), run=run)
    left |= {"compile_causal"} if chosen else set()
    assert {*made._peers_of(case)} == {*cases.PEERS} - left


def test_a_peer_in_fp8_needs_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    case = bench.case_of("hf:gpt2-124m", words(TINY), ["int8"], CPU)
    with pytest.raises(UsageError, match="needs torchao, which is not installed: pip install"):
        ModelSubject(case, "fp8_rowwise", HERE, 0)


def test_in_fp8_torchao_gets_the_layers_that_a_recipe_replaces(monkeypatch):
    """A stand-in for torchao, which is told which layers are its own."""
    asked = {}

    class Config:
        from_recipe_name = staticmethod(lambda name: name)

    def convert(module, *, module_filter_fn, config):
        named = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
        asked[config] = {n: m for n, m in named.items() if module_filter_fn(m, n)}

    fake = types.SimpleNamespace(Float8LinearConfig=Config, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)
    case = bench.case_of("hf:gpt2-124m", words({**TINY, "layers": "1"}), ["int8"], CPU)
    made = ModelSubject(case, "fp8_tensorwise", HERE, 0)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert asked["tensorwise"].keys() == {f"transformer.h.0.{name}" for name in names}
    eager = ModelSubject(case, EAGER, HERE, 0)
    assert float(made.call()) == pytest.approx(float(eager.call()), rel=1e-5)
    odd = nn.ModuleDict({"a": nn.Linear(32, 24), "b": nn.Linear(32, 48)})
    subject.with_linear_in_fp8(odd, "rowwise", ["a", "b"])
    assert asked["rowwise"].keys() == {"b"}  # 24 is no multiple of 16


def test_the_report_has_the_rows_of_models():
    problem = {"model": "hf:gpt2-350m", "batch": 8, "context": 1024, "run": "compile"}
    ratios = {"eager": 2.0, "compile": 1.2, "fp8_tensorwise": 1.1}
    rows = [
        Row("model_step", "int8", "kernel", problem, ms=10.0, vs_peer=ratios, ok=True),
        Row("model_step", "reduce_overhead", "peer", problem, ms=12.0),
        Row("model_step", "int8", "kernel", {"model": "own:make", "run": "eager"}, ms=3.0),
    ]
    results = Results({"name": "GPU", "kind": "cuda", "peaks": {}}, rows)
    page = documents.page(results, "r.json", [])
    line = "| hf:gpt2-350m, 8×1024 tokens, run compile | int8 | 10.00 | launched | – | 2.00× | "
    assert line in page
    assert "tokens, run compile | BF16 torch.compile, reduce-overhead | 12.00 |" in page
    assert "| own:make, run eager, int8 | 3.0 |" in training_report.readme(results).markdown()
    assert training_report.MODEL == cases.OP


@pytest.mark.gpu
def test_the_whole_way_on_the_gpu():
    notes: list[str] = []
    made = ModelBench(Device.parse("cuda"), notes.append, rounds=3, sample_ms=5.0, power_ms=0.0)
    sizes = {**GQA, "width": "256", "hidden": "512", "batch": "4", "context": "256"}
    recipes = ["int8", "int8-fused"]
    for run in cases.RUNS:
        case = bench.case_of("hf:llama-8x2048", [*words(sizes), f"run={run}"], recipes, made.device)
        rows = made.measure(case)
        ours = [row for row in rows if row.role == "kernel"]
        names = [row.kernel for row in rows if row.role == "peer"]
        assert [row.kernel for row in ours] == recipes, notes
        graphs = "graph" if run == "graph" else "reduce_overhead"
        assert {"eager", "compile", graphs} <= {*names}, notes
        for row in ours:
            assert row.ok, row.error
            assert [*row.vs_peer] == names


def test_named_models_need_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert execute("train", ["bench", "hf:gpt2-124m", "--device", "cpu"]) == 2
    says = "jetfire: needs transformers, which is not installed: pip install 'jetfire[hf]'\n"
    assert capsys.readouterr().err == says
