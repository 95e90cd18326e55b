"""`jetfire train plan` beside what was measured, and beside what torch's operators allocate."""

import dataclasses
import gzip
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import jetfire
from jetfire.cli import execute
from jetfire.core.errors import UsageError
from jetfire.core.kernel import PythonKernel
from jetfire.gpt2.model.families import model_of
from jetfire.gpt2.training import command, held_gpt2, held_llama, memory, plan
from jetfire.gpt2.training import step as stepping
from jetfire.gpt2.training.loop import Training
from jetfire.gpt2.training.settings import MOMENT_BITS, make
from jetfire.gpt2.training.step import Step
from jetfire.kernels_cpu.int4_gemm import IntMm
from jetfire.nn.linear import quantised_weights
from jetfire.nn.llama import rotary_tables
from jetfire.nn.recipes import RECIPES
from jetfire.tests.test_memory import Held

RESULTS = Path(jetfire.__file__).parent / "docs" / "results"
GIB = 2**30
INT4 = [name for name, recipe in RECIPES.items() if recipe.int4]
COUNTED = [name for name, recipe in RECIPES.items() if recipe.fallback is None]
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def settings_of_row(row):
    """The settings of a row's step, and its vocabulary; the row leaves out one workspace."""
    sizes = dict(row["problem"])
    vocabulary = sizes.pop("vocabulary")
    recipe = "bf16" if row["kernel"] == "eager" else row["kernel"]
    return make("gpt2-124m", {**sizes, "recipe": recipe, "graph": "false"}), vocabulary


def planned(row):
    """The peak that the plan says of a row's step, in GiB."""
    return (memory.needs(*settings_of_row(row)).peak - memory.WORKSPACE) / GIB


def test_every_step_that_was_measured():
    """But for those that torch.compile runs, FP8's too: it decides itself what is kept.

    INT4's rows here are of blocks that were not fused, and held more.
    """
    rows = json.loads((RESULTS / "h200.json").read_text())["rows"]
    steps = [row for row in rows if row["op"] == "gpt2_step"]
    known = [row for row in steps if row["kernel"] in {*RECIPES, "eager"}]
    others = {row["kernel"] for row in steps} - {row["kernel"] for row in known}
    assert others == {"compile", "compile_own_loss", "fp8_tensorwise", "fp8_rowwise"}
    assert len(known) >= 16
    for row in known:
        if row["kernel"] in INT4:
            assert planned(row) < row["peak_gib"], row
        else:
            assert planned(row) == pytest.approx(row["peak_gib"], rel=0.01), row


def test_every_recipe_s_step_that_was_measured_on_an_h100():
    """With moments in 8 bits, weights in BF16 and logits in parts among them."""
    rows = json.loads((RESULTS / "h100.json").read_text())["rows"]
    steps = [row for row in rows if row["op"] == "gpt2_step" and row["role"] == "kernel"]
    assert len(steps) >= 11
    for row in steps:
        assert planned(row) == pytest.approx(row["peak_gib"], rel=0.013), row


def test_every_run_that_was_logged():
    """Those of shakespeare-char are of code that held more in some blocks, and so are INT4's."""
    seen = 0
    for file in sorted((RESULTS / "training").glob("*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            run, *records = map(json.loads, lines)
        settings = make(run["settings"].pop("preset"), run["settings"])
        if settings.compile:
            with pytest.raises(UsageError, match="compile=true: what torch"):
                memory.needs(settings, run["vocabulary"])
            continue
        seen += 1
        measured = max(record["peak_gib"] for record in records if record["kind"] == "step")
        found = memory.needs(settings, run["vocabulary"]).peak
        if settings.recipe in INT4:
            assert found / GIB < measured, file.name
            continue
        rel = 0.005 if settings.preset == "gpt2-124m" else 0.025
        assert found / GIB == pytest.approx(measured, rel=rel), file.name
    assert seen >= 21


TINY = {"layers": 2, "heads": 2, "width": 128, "batch": 4, "context": 256}
LLAMA = {**TINY, "family": "llama", "hidden": 384}
# Tokens, weights or logits decide; a second micro-batch; one block with few tokens.
SHAPES = {
    "tokens": ({}, 64),
    "weights": ({"width": 256, "heads": 4, "batch": 1}, 64),
    "logits": ({"context": 128}, 2048),
    "again": ({"accumulate": 2}, 64),
    "logits again": ({"accumulate": 2, "context": 128}, 2048),
    "few": ({"layers": 1, "width": 256, "heads": 4, "batch": 2, "context": 64}, 64),
}
# Heads that share keys and values; an MLP as narrow as the stream; a head of its own.
LLAMAS = {
    **{name: SHAPES[name] for name in ("tokens", "weights", "again", "few")},
    "grouped": ({"width": 256, "kv_heads": 1, "hidden": 512}, 64),
    "narrow": ({"hidden": 128}, 64),
    "untied": ({"tied": "false", "context": 128}, 2048),
    "untied again": ({"tied": "false", "accumulate": 2}, 1024),
}
FAMILIES = {
    **{f"gpt2, {name}": (TINY, *shape) for name, shape in SHAPES.items()},
    **{f"llama, {name}": (LLAMA, *shape) for name, shape in LLAMAS.items()},
}


def zeros(kernel, problem, config, inputs, outputs):
    """Launch a kernel that computes nothing."""
    for output in outputs.values():
        output.zero_()


def products(a, b):
    return a.new_zeros((len(a), b.shape[1]))


def gradients(dout, query, key, value, *rest, **options):
    return tuple(map(torch.zeros_like, (query, key, value)))


aten = torch.ops.aten
NOTHING = {
    aten.mm.default: products,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: gradients,
}


class Sized(Held):
    """`Held`, where torch's slowest operators compute nothing either: half of the tests' time."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return super().__torch_dispatch__(NOTHING.get(function, function), types, args, kwargs)


def made(monkeypatch, settings, vocabulary):
    """A model that has trained a step on the CPU, under autocast as on a GPU.

    What is held is a matter of sizes alone: kernels write zeros, which halves the tests' time.
    Of one sequence: what it leaves is what any step leaves, but for a Llama's angles.
    There torch's RMSNorm is one operator, which keeps its input and a number for each row; on the
    CPU it is a row of them, which keep more. LayerNorm is one on both.
    """
    monkeypatch.setattr(stepping, "autocast", lambda _: torch.autocast("cpu", torch.bfloat16))
    monkeypatch.setattr(F, "rms_norm", lambda x, size, w, eps: F.layer_norm(x, size, w, None, eps))
    for kind in (PythonKernel, IntMm):
        monkeypatch.setattr(kind, "launch", zeros)
    torch.manual_seed(0)
    model = model_of(settings.shape(vocabulary), settings.precision)
    step = Step(model, settings, CPU)
    size = (settings.accumulate, 2, settings.batch, settings.context)
    micros = [(ids, targets) for ids, targets in torch.randint(vocabulary, size)]
    step([(ids[:1], targets[:1]) for ids, targets in micros[:1]])
    rotary_tables(settings.context, settings.batch, settings.width // settings.heads, 10000.0, CPU)
    step.optimizer.zero_grad(set_to_none=True)
    return model, step, micros


def sizes_of(settings, vocabulary):
    return settings.shape(vocabulary).parameters().values()


def counted(settings, vocabulary):
    """What the model and a micro-batch hold."""
    return memory.held_by(settings, settings.shape(vocabulary), settings.precision)


@pytest.mark.parametrize("optimizer", MOMENT_BITS)
@pytest.mark.parametrize("shape", ["gpt2, weights", "llama, grouped"])
def test_moments_are_what_an_optimizer_keeps(optimizer, shape, monkeypatch):
    base, changes, vocabulary = FAMILIES[shape]
    settings = make("tiny", {**base, **changes, "optimizer": optimizer})
    _, step, _ = made(monkeypatch, settings, vocabulary)
    kept = (t for state in step.optimizer.state.values() for n, t in state.items() if n != "step")
    assert memory.needs(settings, vocabulary).parts["moments"] == sum(t.nbytes for t in kept)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        *itertools.product(["bf16", "int8", "int8-kept4", "int4-hq-lss"], FAMILIES),
        *(
            (recipe, f"gpt2, {name}")
            for recipe in ("int4-naive", "int4-hq", "int4-hq-bs")
            for name in SHAPES
        ),
        ("int4-hq", "llama, tokens"),
        ("int4-naive", "llama, tokens"),
        ("int8-block32", "llama, tokens"),
    ],
)
def test_a_step_holds_what_is_counted(recipe, shape, monkeypatch):
    """Beside what stands already. The CPU makes the gradient of a BF16 head in BF16 first.

    Its attention makes no dq in FP32, and no dk and dv per head of queries: they would be the peak
    of a block that holds as little as int8-kept4's, int4-hq's or int4-naive's.
    """
    little = recipe.startswith("int8") or recipe in ("int4-hq", "int4-naive")
    for family in (held_gpt2, held_llama) if little else ():
        as_they_are = property(lambda s: 2 * s.x + 4 * getattr(s, "k", s.x))
        monkeypatch.setattr(family._Sizes, "attention", as_they_are)
    base, changes, vocabulary = FAMILIES[shape]
    settings = make("tiny", {**base, **changes, "recipe": recipe, "graph": "false"})
    _, step, micros = made(monkeypatch, settings, vocabulary)
    with Sized() as held:
        step(micros)
    expected = counted(settings, vocabulary)
    whole = memory._weight_bytes(settings, sizes_of(settings, vocabulary))
    moments = memory._moments(expected, whole, settings.accumulate > 1)
    found = max(math.fsum(parts.values()) for _, parts in moments)
    found += expected.remade  # and not seen as they stood
    own_head = recipe != "bf16" and settings.precision.head is None and vocabulary > 64
    on_cpu = 2 * settings.shape(vocabulary).rows * settings.width if own_head else 0
    assert found + on_cpu == pytest.approx(held.peak, rel=0.02)


@pytest.mark.parametrize("head", [{}, {"head": "bf16"}, {"logits": "parts"}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_in_bf16_hold_what_is_counted(shape, head, monkeypatch):
    """And what stands: weights of two bytes, but for the vectors'."""
    monkeypatch.setattr("jetfire.nn.sizes.ROWS_IN_PARTS", 128)
    changes, vocabulary = SHAPES[shape]
    narrow = {"optimizer": "adamw8", "weights": "bf16", "graph": "false"}
    settings = make("tiny", {**TINY, **changes, "recipe": "int8", **narrow, **head})
    model, step, micros = made(monkeypatch, settings, vocabulary)
    weights = sum(p.nbytes for p in model.parameters())
    assert memory.needs(settings, vocabulary).parts["weights"] == weights
    with Sized() as held:
        step(micros)
    moments = memory._moments(counted(settings, vocabulary), weights, settings.accumulate > 1)
    found = max(math.fsum(parts.values()) for _, parts in moments)
    assert found == pytest.approx(held.peak, rel=0.05)


@pytest.mark.parametrize("shape", ["gpt2, tokens", "gpt2, logits", "llama, grouped"])
def test_logits_in_parts_hold_what_is_counted(shape, monkeypatch):
    monkeypatch.setattr("jetfire.nn.sizes.ROWS_IN_PARTS", 128)
    base, changes, vocabulary = FAMILIES[shape]
    more = {"recipe": "int8", "logits": "parts", "graph": "false"}
    settings = make("tiny", {**base, **changes, **more})
    _, step, micros = made(monkeypatch, settings, vocabulary)
    with Sized() as held:
        step(micros)
    expected = counted(settings, vocabulary)
    whole = memory._weight_bytes(settings, sizes_of(settings, vocabulary))
    moments = memory._moments(expected, whole, settings.accumulate > 1)
    found = max(math.fsum(parts.values()) for _, parts in moments) + expected.remade
    assert found == pytest.approx(held.peak, rel=0.03)
    if shape == "gpt2, logits":
        whole_logits = counted(dataclasses.replace(settings, logits="whole"), vocabulary)
        assert expected.parts[-1].kept < 0.7 * whole_logits.parts[-1].kept


@pytest.mark.parametrize("shape", ["gpt2, tokens", "gpt2, logits", "llama, grouped"])
@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8-kept4", "int8-block32", "int4-hq-lss"])
def test_an_evaluation_holds_what_is_counted(recipe, shape, monkeypatch):
    base, changes, vocabulary = FAMILIES[shape]
    settings = make("tiny", {**base, **changes, "recipe": recipe})
    model, step, micros = made(monkeypatch, settings, vocabulary)
    model.eval()
    with torch.no_grad():
        step.model(*micros[0])  # whose codes then stand
        with Sized() as held, torch.autocast("cpu", torch.bfloat16):
            model(*micros[0])
    evaluation = counted(settings, vocabulary).evaluation
    assert evaluation == pytest.approx(held.peak, rel=0.1)
    assert evaluation > 0.98 * held.peak


def test_what_stands_of_a_llama(monkeypatch):
    """Angles, and codes: of each INT8 layer's weight, and of those that multiply as one again."""
    sizes = {**LLAMA, "batch": 3, "graph": "false"}
    settings = make("tiny", {**sizes, "recipe": "int8"})
    model, *_ = made(monkeypatch, settings, 128)
    caches = [cache for cache, _ in quantised_weights(model).values()]
    caches += [cache for block in model.blocks for cache, _ in block.joined_groups()]
    codes = sum(part.nbytes for cache in caches for part in cache.latest.tensors)
    angles = rotary_tables(settings.context, 3, 64, 10000.0, CPU)
    held = counted(settings, 128)
    assert (held.codes, held.rotary) == (codes, sum(table.nbytes for table in angles))
    plain = make("tiny", {**sizes, "recipe": "bf16"})
    angles = model_of(plain.shape(128), "bf16").buffers()
    held = counted(plain, 128)
    assert (held.codes, held.rotary) == (0, sum(table.nbytes for table in angles))


def test_the_parts_are_what_they_are_called():
    """GPT-2 124M has 124 475 904 parameters with a table of 50304 rows (Radford et al., 2019)."""
    settings = make("gpt2-124m", {"recipe": "int8", "accumulate": 2})
    needs = memory.needs(settings, 50257)
    assert needs.parts["weights"] == needs.parts["gradients"] == 4 * 124_475_904
    assert needs.parts["moments"] == 8 * 124_475_904
    codes = 2 * (12 * 12 * 768**2 + 50304 * 768)
    assert needs.parts["codes"] == pytest.approx(codes * (1 + 4 / 128**2))
    assert needs.total == needs.peak + needs.beside > needs.peak
    assert memory.needs(make("gpt2-124m", {"graph": "false"}), 50257).beside == 0


@pytest.mark.parametrize(
    ("preset", "recipe", "remade"),
    [
        ("gpt2-124m", "int8", 0),
        ("gpt2-124m", "int4-hq-lss", 2 * 12 * 12 * 768**2),
        ("llama-160m", "int8-block32", 2 * 12 * (3 * 768**2 + 2 * 768 * 2048) * (1 + 4 / 32**2)),
    ],
)
def test_an_evaluation_beside_a_graph_makes_codes_of_its_own(preset, recipe, remade):
    """But those that the optimizer leaves, which are where the graph has them."""
    settings = make(preset, {"recipe": recipe})
    evaluation = counted(settings, 50257).evaluation
    assert memory.needs(settings, 50257).beside - evaluation == pytest.approx(remade)


def plan_json(capsys, words):
    code = execute("train", ["plan", *words.split(), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_what_would_fit_fits(capsys):
    words = "gpt2-1558m --recipe bf16 --data openwebtext --memory"
    code, found, err = plan_json(capsys, f"{words} 40GiB")
    assert code == 2
    assert err == (
        f"jetfire: gpt2-1558m needs {found['needs_gib']:.2f} GiB of 40.00: expected one of these, "
        "or more memory\n"
    )
    assert sum(found["parts_gib"].values()) == pytest.approx(found["peak_gib"])
    assert not found["fits"]
    assert found["instead"][0]["give"] == "--recipe bf16 --set batch=2,accumulate=256"
    assert len(found["instead"]) == len(COUNTED)
    for one in found["instead"]:
        assert one["needs_gib"] <= 40
        again = f"gpt2-1558m --data openwebtext {one['give']} --memory 40GiB"
        code, other, _ = plan_json(capsys, again)
        assert (code, other["fits"], other["instead"]) == (0, True, [])
        assert other["needs_gib"] == pytest.approx(one["needs_gib"])


def test_recipes_that_a_width_does_not_have_are_not_named():
    settings = make("tiny", {"width": 48, "heads": 4, "recipe": "bf16"})
    names = {fit.words.split()[1] for fit in plan.fitting(settings, 256, 2.0**40)}
    assert names == {name for name in COUNTED if not name.startswith("int4-hq")}
    settings = make("tiny-llama", {"hidden": 96, "recipe": "bf16"})
    names = {fit.words.split()[1] for fit in plan.fitting(settings, 256, 2.0**40)}
    assert names == {
        name
        for name in COUNTED
        if name not in ("int8", "int8-kept4", "int8-block64", "int8-block128")
    }


def test_a_step_has_no_more_micro_batches_than_settings_allow():
    settings = make("tiny", {"accumulate": 1 << 15})
    least = memory.needs(make("tiny", {"accumulate": 1 << 16, "batch": 8}), 256).total
    assert [fit.words for fit in plan.fitting(settings, 256, least)][:1] == [
        "--recipe int8 --set batch=8,accumulate=65536"
    ]
    assert list(plan.fitting(settings, 256, 0.5 * least)) == []


def test_nothing_fits(capsys):
    code, found, err = plan_json(capsys, "gpt2-1558m --memory 12GB")
    assert (code, found["instead"]) == (2, [])
    assert "expected a smaller model or context, or more memory" in err


def test_a_graph_is_given_up_where_that_makes_it_fit(capsys):
    words = "gpt2-350m --recipe bf16 --data openwebtext --set batch=1"
    _, found, _ = plan_json(capsys, words)
    limit = (found["peak_gib"] + found["needs_gib"]) / 2
    _, found, _ = plan_json(capsys, f"{words} --memory {limit:.3f}GiB")
    assert found["instead"][0]["give"].endswith("batch=1,accumulate=64,graph=false")


def test_a_table_shows_the_parts(capsys):
    assert execute("train", ["plan", "shakespeare-char", "--memory", "80GB"]) == 0
    out, err = capsys.readouterr()
    assert "int8, 6 layers of width 384, vocabulary 65 (shakespeare-char), 64×256 tokens" in out
    assert all(name in out for name in ("weights", "moments", "activations", "peak, in forward"))
    assert err == ""


CONFIG = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128, "vocab_size": 999}


def test_a_config_of_transformers(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))
    code, found, _ = plan_json(capsys, f"{tmp_path}/config.json --set batch=2,dropout=0")
    assert code == 0
    assert found["vocabulary"] == 999
    chosen = {name: found["settings"][name] for name in ("layers", "heads", "width", "context")}
    assert chosen == {"layers": 2, "heads": 4, "width": 64, "context": 128}
    assert (found["settings"]["batch"], found["settings"]["dropout"]) == (2, 0)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data nosuch", "--data nosuch"),
        ("--data python", "--data python"),
        ("--set data=nosuch", "--data nosuch"),
        ("--set tokenizer=byte", "tokenizer=byte"),
    ],
)
def test_data_beside_a_config_are_refused(tmp_path, capsys, words, named):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "model_type": "gpt2"}))
    assert execute("train", ["plan", str(file), *words.split()]) == 2
    said = f"jetfire: {named}: {file} has a vocabulary of its own\n"
    assert capsys.readouterr() == ("", said)


def test_a_config_of_a_llama(tmp_path, capsys):
    """TinyLlama 1.1B's sizes (arXiv 2401.02385): those of the preset, which it is counted as."""
    config = {"model_type": "llama", "num_hidden_layers": 22, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 5632}
    config |= {"max_position_embeddings": 2048, "vocab_size": 32000, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "--set batch=4,accumulate=64 --memory 24GB"
    code, found, _ = plan_json(capsys, f"{tmp_path}/config.json {words}")
    preset = make("llama-1b", {})
    assert (code, found["fits"]) == (2, False)
    assert found["needs_gib"] == memory.needs(preset, 32000).total / GIB
    assert found["parts_gib"]["weights"] == pytest.approx(4 * 1_100_048_384 / GIB)
    codes = 22 * (2048 * (2 * 2048 + 2 * 256 + 3 * 5632) + 2048 * (2048 + 2 * 256 + 2 * 5632))
    head = 32000 * 2048
    assert found["parts_gib"]["codes"] == pytest.approx(2 * (codes + head) * (1 + 2**-12) / GIB)
    assert found["parts_gib"]["rotary tables"] == 4 * (4 * 2048 * 64) / GIB
    for one in found["instead"]:
        assert one["needs_gib"] * GIB <= 24e9
        code, other, _ = plan_json(capsys, f"llama-1b --data openwebtext {one['give']}")
        assert code == 0
        assert other["needs_gib"] > one["needs_gib"]  # with a larger vocabulary


def test_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom jetfire.cli import execute\n"
    code += "sys.exit(execute('train', ['plan', 'gpt2-350m', '--memory', '80GB']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "in all" in done.stdout


@pytest.fixture
def full(monkeypatch, tmp_path):
    """A GPU that is full when training begins, of which 1 GiB could be had."""

    def run(self, stop):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 PiB")

    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Training, "run", run)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB // 2, GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB // 2)
    own = command._planned

    def on_a_gpu(settings, vocabulary, device):
        class Gpu:
            kind, torch_device = "cuda", CPU

        return own(settings, vocabulary, Gpu)

    monkeypatch.setattr(command, "_planned", on_a_gpu)
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 3000)
    return f"tiny --device cpu --data {text} -o {tmp_path / 'run'}"


def test_out_of_memory_says_what_is_needed_and_what_needs_less(full, capsys):
    sizes = "--set width=128,batch=4096,context=64"
    assert execute("train", f"{full} {sizes}".split()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    needs = memory.needs(make("tiny", {"batch": 4096}), 256)
    assert err.startswith("jetfire: out of memory (CUDA out of memory. Tried to allocate 9.00 PiB)")
    assert f"by its sizes the run needs {needs.total / GIB:.1f} GiB (activations" in err
    assert "could have 1.0: expected --recipe int8 --set batch=1024,accumulate=4, which" in err


def test_out_of_memory_of_a_llama(full, capsys):
    sizes = {"batch": 1024, "width": 128, "context": 64, "family": "llama"}
    words = ",".join(f"{name}={value}" for name, value in sizes.items())
    assert execute("train", f"{full} --set {words}".split()) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    needs = memory.needs(make("tiny", sizes), 256)
    assert f"by its sizes the run needs {needs.total / GIB:.1f} GiB (activations" in err
    assert "could have 1.0: expected --recipe int8 --set batch=" in err


def test_out_of_memory_where_no_plan_is_made():
    settings = make("tiny", {"compile": "true"})
    found = plan.advice(settings, 256, GIB)
    assert found.startswith("expected a smaller batch, context or model (no plan: compile=true")
    assert plan.advice(make("tiny", {}), 256, 1.0).endswith("expected a smaller model or context")
