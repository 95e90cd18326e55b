"""Training GPT-2 and Llama: settings, the step, faults, checkpoints, log, curves and command."""

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import files
from jetfire.core.device import Device
from jetfire.core.errors import JetfireError, JetfireWarning, UsageError
from jetfire.gpt2.data import prepare as preparation
from jetfire.gpt2.data import tokens as data
from jetfire.gpt2.model.shape import LlamaShape
from jetfire.gpt2.training import checkpoint, command, faults, graph, log, utilisation
from jetfire.gpt2.training.loop import Training
from jetfire.gpt2.training.options import TrainOptions
from jetfire.gpt2.training.parallel import Group
from jetfire.gpt2.training.settings import EARLIER, MOST_LOOKS, PRESETS, Settings, make, resumed
from jetfire.gpt2.training.state import build
from jetfire.gpt2.training.step import Step, seed_step
from jetfire.nn import CodesQuality, Watched, watch
from jetfire.nn.recipes import RECIPES
from jetfire.report import curves

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "layers": 2,
    "heads": 2,
    "width": 32,
    "context": 16,
    "batch": 4,
    "steps": 8,
    "warmup": 2,
    "evaluate_every": 4,
    "evaluate_batches": 2,
    "checkpoint_every": 4,
}
SET = [f"--set={name}={value}" for name, value in SMALL.items() if name != "steps"]
HERE = Device.parse("auto")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Text that is quickly learnt and quickly prepared."""
    file = tmp_path_factory.mktemp("text") / "counting.txt"
    file.write_text(" ".join(str(i) for i in range(4000)))
    return file


@pytest.fixture(scope="module")
def tokens(text):
    return data.open_tokens(preparation.prepare(text, "byte", text.parent / "tokens"))


def settings_of(**changes) -> Settings:
    return make("tiny", {**SMALL, "recipe": "bf16", **changes})


def run(tokens, folder=None, saved=None, **changes):
    """Train in this process; the training and its records."""
    records: list[dict] = []
    training = Training(settings_of(**changes), tokens, HERE, folder, records.append)
    if saved is not None:
        training.restore(saved)
    training.run()
    return training, records


# Llama's own settings beside SMALL: of a width of all keys that is a multiple of a block's side.
LLAMA = {"family": "llama", "tied": "false", "hidden": "64"}


def losses(records) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["norm"]) for r in records if r["kind"] == "step"]


# --- settings ---------------------------------------------------------------------------------


def test_every_preset_is_whole():
    for name in PRESETS:
        one = make(name, {})
        assert one.width % one.heads == 0
        assert one.warmup < one.steps
    char = make("shakespeare-char", {})
    assert (char.layers, char.heads, char.width, char.context, char.batch) == (6, 6, 384, 256, 64)
    assert (char.dropout, char.steps, char.rate) == (0.2, 5000, 1e-3)


def test_llama_s_presets_have_published_sizes():
    def millions(name):
        shape = make(name, {}).shape(50257)
        return sum(map(math.prod, shape.parameters().values())) / 1e6

    # As TinyLlama's paper has them, in table 1.
    large = make("llama-1b", {})
    assert (large.layers, large.heads, large.kv_heads, large.width) == (22, 32, 4, 2048)
    assert (large.hidden, large.context, large.tied, large.rate) == (5632, 2048, False, 4e-4)
    assert large.batch * large.accumulate * large.context == 524288
    assert millions("llama-160m") == pytest.approx(162.2, abs=0.1)
    assert make("llama-160m", {}).shape(50257).block_weights == 12 * 12 * 768**2
    tiny = make("tiny-llama", {})
    assert tiny.kv_heads < tiny.heads
    for recipe in RECIPES:
        dataclasses.replace(tiny, recipe=recipe)


def test_sizes_that_are_left_open_are_the_usual_ones():
    one = make("gpt2-124m", {"family": "llama"})
    assert (one.kv_heads, one.hidden, one.tied) == (12, 2048, True)
    assert make("llama-160m", {"kv_heads": 0, "hidden": 0}) == make("llama-160m", {})


def test_settings_of_earlier_versions_are_gpt2_s():
    before = settings_of().as_dict()
    for name in EARLIER:
        del before[name]
    assert resumed(before, {}, "run") == settings_of()
    for kept in (before, settings_of().as_dict()):
        with pytest.raises(UsageError, match="--resume family=llama: run was begun with family=g"):
            resumed(kept, {"family": "llama"}, "run")
    with pytest.raises(UsageError, match="--resume tied=false: run was begun with tied=true"):
        resumed(before, {"tied": False}, "run")


@pytest.mark.parametrize(
    ("preset", "layers", "least"), [("gpt2-124m", 49, 2), ("llama-1b", 155, 7)]
)
def test_a_run_is_not_watched_so_often_that_its_log_is_too_long(preset, layers, least):
    assert make(preset, {"watch": least}).watch == least
    wanted = f"20000 steps of {layers} layers would be too long to read: expected at least {least}"
    with pytest.raises(UsageError, match=wanted):
        make(preset, {"watch": least - 1})
    codes = CodesQuality(-12.34, 1.234e-05, 1.234e-05, 1.234e-05)
    names = [f"blocks.{number}.projection" for number in range(layers)]
    seen = Watched(*(dict.fromkeys(names, codes) for _ in range(3)))
    line = json.dumps(log.watched(20000, seen))
    assert MOST_LOOKS * len(line) / layers < 0.75 * log.MOST


def test_the_rate_rises_and_falls_to_the_floor():
    one = settings_of(steps=100, warmup=10, rate=1.0, floor=0.1)
    assert [one.rate_at(step) for step in (1, 10, 100)] == pytest.approx([0.1, 1.0, 0.1])
    assert one.rate_at(55) == pytest.approx(0.55)
    quarter = settings_of(steps=110, warmup=10, rate=1.0, floor=0.1).rate_at(35)
    assert quarter == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a cosine
    assert settings_of(steps=1, warmup=0).rate_at(1) > 0


USAGE = [
    ([], "which preset? expected one of tiny, shakespeare-char"),
    (["gpt9"], "no preset 'gpt9': expected one of tiny"),
    (["tiny", "--recipe", "fp4"], "no recipe 'fp4': expected one of bf16"),
    (["tiny", "--set", "rat=1"], "no setting 'rat' (did you mean rate?): expected one of preset"),
    (["tiny", "--set", "rate"], "--set rate: expected key=value"),
    (["tiny", "--set", "rate=x"], "rate=x: expected a number"),
    (["tiny", "--set", "rate=nan"], "rate=nan: expected a finite number"),
    (["tiny", "--set", "batch=0"], "batch=0: expected 1 to 65536"),
    (["tiny", "--set", "batch=1.5"], "batch=1.5: expected an integer"),
    (["tiny", "--set", "layers=1000000000"], "layers=1000000000: expected 1 to 1024"),
    (["tiny", "--set", "steps=100000000"], "steps=100000000: expected at most 99999999"),
    (["tiny", "--set", "width=32768,layers=512"], "parameters take 24577 GiB"),
    (["tiny", "--set", "dropout=1"], "dropout=1.0: expected 0 to 0.999"),
    (["tiny", "--set", "heads=3"], "width=128: expected a multiple of heads=3"),
    (["tiny", "--set", "family=mamba"], "expected gpt2 or llama"),
    (["tiny", "--set", "kv_heads=2"], "kv_heads=2 with family=gpt2: expected family=llama"),
    (["tiny", "--set", "tied=false"], "tied=false with family=gpt2: expected family=llama"),
    (["tiny-llama", "--set", "hidden=-1"], "hidden=-1: expected 0 to 262144"),
    (["tiny-llama", "--set", "kv_heads=3"], "kv_heads=3: expected a divisor of heads=4"),
    (["tiny-llama", "--set", "kv_heads=1"], "keys of 64: expected a multiple of 128"),
    (
        ["tiny-llama", "--recipe", "int4-hq", "--set", "hidden=100"],
        "hidden=100: group=32 with 100 inputs: expected 1 or 2 or 4",
    ),
    (["tiny", "--set", "compile=maybe"], "compile=maybe: expected true or false"),
    (["tiny", "--set", "group=3"], "group=3: expected one of recipe, search, 1, 2, 4"),
    (
        ["tiny", "--set", "group=64"],
        "group=64 with recipe=int8: expected an INT4 recipe",
    ),
    (
        ["tiny", "--recipe", "int4-hq", "--set", "width=48,heads=2"],
        "width=48: group=32 with 48 inputs: expected 1 or 2 or 4 or 8 or 16",
    ),
    (["tiny", "--set", "graph=maybe"], "graph=maybe: expected auto or true or false"),
    (
        ["tiny", "--set", "graph=true", "--device", "cpu"],
        "graph=true: expected a CUDA device, not cpu",
    ),
    (["tiny", "--watch", "x"], "--watch x: expected an integer"),
    (["tiny", "--watch", "-1"], "--watch -1: expected at least 0"),
    (["tiny", "--watch", "5", "--recipe", "bf16"], "watch=5: expected an INT8 recipe, not bf16"),
    (["tiny", "--watch", "5", "--recipe", "int4-hq"], "watch=5: expected an INT8 recipe, not int4"),
    (["tiny", "--set", "watch=5,parallel=fsdp"], "watch=5: expected parallel=none or ddp, not"),
    (["tiny", "--set", "parallel=x"], "parallel=x: expected none or ddp or fsdp"),
    (["tiny", "--steps", "x"], "--steps x: expected an integer"),
    (["tiny", "--data", "/none"], "/none: no such file"),
    (["tiny", "--resume"], "--resume: expected -o RUN"),
    (["tiny", "--resume", "-o", "/none/run"], "--resume: /none/run holds no run"),
    (["tiny", "--nope"], "no option --nope: expected one of --recipe"),
    (["tiny", "--data", "a\x1b[31m"], r"a\x1b[31m': expected a line of at most 2000 characters"),
    (["plot", "/none", "-o", "x.svg"], "/none: expected a run's folder or its log.jsonl"),
    (["sample", "/none"], "/none: expected a run with a checkpoint"),
    (["plot", "/none", "-o", "x.bmp"], "-o x.bmp: expected a file named .png"),
]


@pytest.mark.parametrize(
    ("changes", "on_gpu"),
    [
        ({}, True),
        ({"recipe": "int8-block64", "parallel": "ddp"}, True),
        ({"parallel": "fsdp"}, False),
        ({"compile": True}, False),
        ({"compile": True, "graph": "true"}, True),
        ({"graph": "false"}, False),
    ],
)
def test_steps_are_graphs_where_they_can_be(changes, on_gpu):
    settings = settings_of(**changes)
    assert graph.used(settings, torch.device("cuda")) == on_gpu
    if settings.graph != "true":
        assert not graph.used(settings, torch.device("cpu"))


@pytest.mark.parametrize("kept", [True, False, "true", "false", "auto"])
def test_graph_as_earlier_checkpoints_hold_it(kept):
    before = {**settings_of().as_dict(), "graph": kept}
    assert resumed(before, {}, "run").graph == str(kept).lower()
    assert resumed(before, {"graph": "auto"}, "run").graph == "auto"


@pytest.mark.parametrize(("recipe", "head"), [("int8", "bf16"), ("int8-block128", "recipe")])
def test_a_head_as_earlier_checkpoints_had_it(recipe, head):
    before = settings_of(recipe=recipe).as_dict()
    del before["head"]
    assert resumed(before, {}, "run").head == head
    assert resumed(before, {}, "run").precision.head is None


def test_several_processes_steps_are_captured_only_split():
    step = SimpleNamespace(group=Group(0, 2), split=False, sharded=False)
    with pytest.raises(ValueError, match="only if it is split"):
        graph.graphed(step)


@pytest.mark.parametrize(("arguments", "says"), USAGE, ids=[" ".join(a) for a, _ in USAGE])
def test_usage_errors_are_one_line_and_exit_2(arguments, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert execute("train", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jetfire: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert list(tmp_path.iterdir()) == []


# --- one step ---------------------------------------------------------------------------------


def model_and_batch(rows=4, **changes):
    one = settings_of(**changes)
    model = build(one, 64, HERE)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(64, (rows, one.context + 1), generator=generator)
    ids = ids.to(HERE.torch_device)
    return one, model, (ids[:, :-1], ids[:, 1:])


def test_a_step_is_clipped_adamw(monkeypatch):
    """In fp32 on any device: what bf16 rounds apart, AdamW would move by a part of the rate."""
    fp32 = partial(torch.autocast, enabled=False)
    monkeypatch.setattr("jetfire.gpt2.training.step.autocast", lambda device: fp32(device.type))
    one, model, micro = model_and_batch(clip=0.1)
    _, twin, _ = model_and_batch()
    step = Step(model, one, HERE.torch_device)
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        step.set_rate(1e-2)
        loss, norm = step([micro])
        plain.zero_grad()
        expected = twin(*micro)
        expected.backward()
        total = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert norm.item() == pytest.approx(total.item(), rel=1e-4)
        assert norm.item() > 0.1
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip", [0.0, 1e3])
def test_small_gradients_are_left_as_they_are(clip):
    """Clipping scales down what is longer than it, and nothing up."""
    one, model, micro = model_and_batch(clip=clip)
    step = Step(model, one, HERE.torch_device)
    step.set_rate(1e-2)
    norm = step([micro])[1]
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    moments = torch.cat([step.optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])
    assert 0 < norm < 10
    torch.testing.assert_close(torch.linalg.vector_norm(gradients), norm)
    torch.testing.assert_close(moments, gradients * 0.1, rtol=1e-3, atol=1e-8)


def test_micro_batches_make_one_batch():
    one, model, (ids, targets) = model_and_batch(accumulate=2)
    _, twin, _ = model_and_batch()
    two = [(ids[:2], targets[:2]), (ids[2:], targets[2:])]
    halves = Step(model, one, HERE.torch_device)(two)
    whole = Step(twin, dataclasses.replace(one, accumulate=1), HERE.torch_device)([(ids, targets)])
    torch.testing.assert_close(halves, whole, rtol=1e-3, atol=1e-5)


def test_a_fault_stops_all_later_updates():
    one, model, micro = model_and_batch()
    step = Step(model, one, HERE.torch_device)
    step.set_rate(1e-2)
    step([micro])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hook = model.blocks[0].expand.weight.register_hook(lambda g: g * math.inf)
    assert not torch.isfinite(step([micro])[1])
    hook.remove()
    assert torch.isfinite(step([micro])[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_random_numbers_are_a_functions_of_the_step():
    drawn = []
    for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1)):
        seed_step(seed, step)
        drawn.append(torch.rand(3, device=HERE.torch_device).tolist())
    assert drawn[0] == drawn[3]
    assert len({tuple(one) for one in drawn}) == 3


RESUMED = [
    {"recipe": "bf16"},
    {"recipe": "bf16", "order": "shuffled"},
    {"recipe": "int8-block32"},
    {"recipe": "int4-hq-lss"},
    {"recipe": "int4-hq", "group": "search"},
    {"recipe": "int4-naive"},
    {"recipe": "bf16", **LLAMA},
    {"recipe": "int8-block32", **LLAMA},
    {"recipe": "int8-block32", "head": "32", **LLAMA, "tied": "true"},
    {"recipe": "int8-block32", "head": "32", "logits": "parts"},
    {"recipe": "int4-hq-lss", **LLAMA},
]


@pytest.mark.parametrize("order", ["drawn", "shuffled"])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_seed_gives_every_recipe_the_same_weights_and_batches(recipe, order, family, tokens):
    """What `jetfire-train study` pairs its runs by; another seed gives others."""
    sizes = {**LLAMA, "width": 256, "hidden": 128} if family == "llama" else {}

    def begun(recipe: str, seed: int):
        one = settings_of(recipe=recipe, seed=seed, order=order, accumulate=2, **sizes)
        training = Training(one, tokens, HERE, None, lambda record: None)
        batches = [torch.cat(pair) for step in (1, 8) for pair in training.micros(step)]
        return dict(training.model.named_parameters()), torch.cat(batches)

    (base, read), (ours, same), (_, others) = begun("bf16", 5), begun(recipe, 5), begun(recipe, 6)
    assert base.keys() <= ours.keys()
    for name, weight in base.items():
        assert torch.equal(weight, ours[name]), name
    assert torch.equal(read, same)
    assert not torch.equal(read, others)


# --- the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "recipe"),
    [
        ("tiny", "bf16"),
        ("tiny", "int8-block32"),
        ("tiny", "int4-hq-lss"),
        ("tiny-llama", "int8"),
    ],
)
def test_tiny_learns(preset, recipe, tokens):
    """Enough of the preset's own 50 steps to have fallen by a nat."""
    records: list[dict] = []
    one = make(preset, {"recipe": recipe, "steps": 4, "evaluate_batches": 2})
    Training(one, tokens, HERE, None, records.append).run()
    first, last = records[0], records[-2]
    assert last["kind"] == "step"
    assert last["loss"] < first["loss"] - 1.0
    assert records[-1]["kind"] == "evaluation"
    assert records[-1]["loss"] < first["loss"] - 1.0


@pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: "-".join(changes.values()))
def test_resuming_repeats_the_losses(changes, tokens, tmp_path):
    changes = {**changes, "steps": 6, "dropout": 0.1, "accumulate": 2, "keep": 3}
    _, whole = run(tokens, tmp_path, **changes)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000004", "step-00000006"]
    saved = checkpoint.open_checkpoint(tmp_path / "checkpoints" / "step-00000004")
    training, rest = run(tokens, saved=saved, **changes)
    assert losses(rest) == losses(whole)[4:]
    assert training.done == 6
    evaluated = [r["loss"] for r in whole if r["kind"] == "evaluation"]
    assert [r["loss"] for r in rest if r["kind"] == "evaluation"] == evaluated[1:]


def whole_state(training):
    """All that a run's next step begins with."""
    found = {**training.model.state_dict(), "failed": training.step.failed}
    for parameter, state in training.step.optimizer.state.items():
        name = next(n for n, p in training.model.named_parameters() if p is parameter)
        found |= {f"{name}.{key}": value for key, value in state.items()}
    return found


def check_watching_changes_nothing(tokens, folder, **changes):
    """Of a run and of one that goes on from its middle; returns what is watched."""
    changes = {"steps": 6, "dropout": 0.1, "accumulate": 2, "keep": 3, **changes}
    plain, expected = run(tokens, **changes)
    training, records = run(tokens, folder, watch=3, **changes)
    saved = checkpoint.open_checkpoint(folder / "checkpoints" / "step-00000004")
    again, rest = run(tokens, saved=saved, watch=1, **changes)
    assert losses(records) == losses(expected)
    assert losses(rest) == losses(expected)[4:]
    for other in (training, again):
        for name, value in whole_state(plain).items():
            assert torch.equal(whole_state(other)[name], value), name
    assert [r["step"] for r in rest if r["kind"] == "watch"] == [5, 6]
    watched = [r for r in records if r["kind"] == "watch"]
    assert [r["step"] for r in watched] == [3, 6]
    assert watched[1] == next(r for r in rest if (r["kind"], r["step"]) == ("watch", 6))
    return watched


@pytest.mark.parametrize("recipe", ["int8", "int8-block32"])
def test_watching_changes_no_bit(recipe, tokens, tmp_path):
    first, _ = check_watching_changes_nothing(tokens, tmp_path, recipe=recipe)
    parts = ("qkv", "projection", "expand", "contract")
    names = {f"blocks.{number}.{part}" for number in range(2) for part in parts}
    assert first["layers"].keys() == names | ({"tokens"} if recipe == "int8" else set())
    ratios = {
        (layer, kind): codes["sqnr"]
        for layer, of in first["layers"].items()
        for kind, codes in of.items()
    }
    assert len(ratios) == 3 * len(first["layers"])
    assert all(20 < ratio < 50 for ratio in ratios.values())
    worst = first["worst"]
    assert worst["sqnr"] == min(ratios.values()) == ratios[worst["layer"], worst["kind"]]


def test_what_is_watched_is_what_the_step_multiplies(tokens, monkeypatch):
    """The same codes: of the same batch, dropped out and rounded by the same draws."""
    seen = []

    def launch(training, step):
        with watch(training.model) as found:
            launched = launch_unseen(training, step)
        seen.append(log.watched(step, found))
        return launched

    launch_unseen = Training._launch
    monkeypatch.setattr(Training, "_launch", launch)
    changes = {"recipe": "int8", "dropout": 0.1, "graph": "false", "deterministic": True}
    with command.algorithms(settings_of(**changes)):
        _, records = run(tokens, watch=1, steps=3, **changes)
    assert [r for r in records if r["kind"] == "watch"] == seen


def test_a_log_has_null_for_what_is_not_finite(tmp_path):
    none, bad = CodesQuality(math.inf, 1.0, 0.0, 0.0), CodesQuality(math.nan, 0.0, 0.0, math.nan)
    record = log.watched(3, Watched({"a": none, "b": none}, {"b": bad}))
    assert record["worst"] == {"layer": "b", "kind": "input", "sqnr": None}
    journal = log.Log(tmp_path)
    for line in (HEAD, record, {**record, "layers": {"a": {"weight": {"sqnr": "high"}}}}):
        journal.write(line)
    journal.close()
    with pytest.warns(JetfireWarning, match=r"line 3 passed over: \S+sqnr='high': expected"):
        assert log.read(tmp_path) == [HEAD, record]
    assert record["layers"]["b"]["input"] == {
        "sqnr": None,
        "zeros": 0.0,
        "clipped": 0.0,
        "largest": None,
        "fallback": 0.0,
    }


def test_one_recipe_goes_on_in_another(tokens, tmp_path):
    _, before = run(tokens, tmp_path, steps=4)
    saved = checkpoint.find(tmp_path)
    _, after = run(tokens, saved=saved, recipe="int8-block32")
    assert [step for step, *_ in losses(after)] == [5, 6, 7, 8]
    assert losses(after)[0][1] < losses(before)[0][1]


def test_int4_goes_on_from_any_recipe_and_back(tokens, tmp_path):
    """A group is searched on the first batch after BF16; what INT4 leaves goes on without it."""
    _, before = run(tokens, tmp_path, steps=4)
    searching = {"recipe": "int4-hq-lss", "group": "search"}
    middle, found = run(tokens, tmp_path, checkpoint.find(tmp_path), steps=8, **searching)
    saved, layer = checkpoint.find(tmp_path), middle.model.blocks[0].qkv
    assert saved.model()["blocks.0.qkv.searched"].tolist() == [layer.group]
    other, _ = run(tokens, None, saved, steps=9, **searching)
    assert other.model.blocks[0].qkv.group == layer.group
    run(tokens, None, saved, recipe="int4-naive", steps=9)
    _, after = run(tokens, tmp_path, saved, steps=12)
    steps = losses(before) + losses(found) + losses(after)
    assert [step for step, *_ in steps] == list(range(1, 13))
    first, *_, last = [loss for _, loss, _ in steps]
    assert last < losses(found)[0][1] < first


FAULTS = [
    ({}, "blocks.1.expand.weight", False, "loss is nan at step 3; first at blocks.1"),
    ({}, "tokens.weight", False, "at the loss, after the last block: tokens.weight holds NaN"),
    (
        {},
        "blocks.0.qkv.weight",
        True,
        "the gradient's norm is inf at step 3; first at "
        "blocks.0.qkv.weight: its gradient holds Inf",
    ),
    (LLAMA, "blocks.1.gate.weight", False, "loss is nan at step 3; first at blocks.1"),
    (LLAMA, "head.weight", False, "at the loss, after the last block: head.weight holds NaN"),
    (LLAMA, "blocks.0.key.weight", True, "blocks.0.key.weight: its gradient holds Inf"),
]


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int4-hq-lss"])
@pytest.mark.parametrize(
    ("sizes", "name", "gradient", "says"), FAULTS, ids=[name for _, name, *_ in FAULTS]
)
def test_a_fault_names_step_and_layer(sizes, name, gradient, says, recipe, tokens, tmp_path):
    records: list[dict] = []
    # No graph would call a hook that came after it.
    graph = "false" if gradient else "auto"
    one = settings_of(recipe=recipe, graph=graph, checkpoint_every=2, **sizes)
    training = Training(one, tokens, HERE, tmp_path, records.append)
    launch, parameter = training._launch, training.model.get_parameter(name)

    def broken(step):
        if step == 3 and gradient:
            parameter.register_hook(lambda g: torch.full_like(g, math.inf))
        elif step == 3:
            with torch.no_grad():
                parameter[0, 0] = math.nan
        return launch(step)

    training._launch = broken
    with pytest.raises(JetfireError, match="step-00000002") as raised:
        training.run()
    assert says in str(raised.value)
    assert raised.value.exit_code == 1
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2]
    assert records[-1] == {"kind": "fault", "step": 3, "message": str(raised.value)}
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 2
    assert all(torch.isfinite(value).all() for value in found.model().values())


def test_a_fault_is_looked_for_in_the_batch_that_failed(tokens, monkeypatch):
    seen = []
    monkeypatch.setattr(faults, "find", lambda model, micros, *_: seen.extend(micros) or "it")
    training = Training(settings_of(), tokens, HERE, None, lambda record: None)
    launch = training._launch

    def broken(step):
        if step == 3:
            training.model.norm.weight.data.fill_(math.nan)
        return launch(step)

    training._launch = broken
    with pytest.raises(JetfireError, match="at step 3; first at it"):
        training.run()
    (micro,) = seen
    assert torch.equal(micro[0], training.micros(3)[0][0])
    assert not torch.equal(micro[0], training.micros(2)[0][0])


def test_an_evaluation_drops_nothing_out_and_training_goes_on_to(tokens):
    training = Training(settings_of(dropout=0.5), tokens, HERE, None, print)
    assert training.evaluate() == training.evaluate()
    assert training.model.training


def test_a_validation_loss_that_is_not_finite_stops_the_run(tokens, monkeypatch):
    monkeypatch.setattr(Training, "evaluate", lambda self: math.nan)
    with pytest.raises(JetfireError, match="validation loss is nan at step 4; no checkpoint"):
        run(tokens)


def test_the_devices_peak_says_where_it_is_from():
    h200 = Device("cuda", name="NVIDIA H200", capability=(9, 0))
    found = utilisation.peak(h200)
    assert found is not None
    assert found.source == "measured, h200.json"
    assert 500 < found.tflops < 989.5
    a100 = utilisation.peak(Device("cuda", name="NVIDIA A100-SXM4-80GB", capability=(8, 0)))
    assert a100 == utilisation.Peak(312.0, "datasheet")
    assert utilisation.peak(Device("cpu", name="some CPU")) is None


def test_utilisation_is_of_all_processes_devices(tokens):
    training = Training(settings_of(), tokens, HERE, None, print)
    training.flops, training.peak = 1e9, utilisation.Peak(2.0, "test")
    assert training._mfu(1000.0) == 0.5
    training.group = Group(0, 4)
    assert training._mfu(1000.0) == 0.125
    training.peak = None
    assert training._mfu(1000.0) is None


def test_flops_are_six_a_weight_and_attention():
    one = make("gpt2-124m", {})
    assert one.shape(50304).flops_per_token == pytest.approx(
        6 * (85e6 + 38.6e6) + 12 * 12 * 768 * 1024, rel=0.01
    )
    # Query and output, keys and values, the gated MLP; the head once, tied or not.
    layer = 2 * 2048**2 + 2 * 256 * 2048 + 3 * 2048 * 5632
    for tied in (False, True):
        shape = make("llama-1b", {"tied": tied}).shape(50257)
        assert shape.flops_per_token == pytest.approx(
            6 * (22 * layer + 50257 * 2048) + 12 * 22 * 2048 * 2048
        )


# --- checkpoints and the log --------------------------------------------------------------------


def test_checkpoints_kept_are_the_last_and_the_best(tokens, tmp_path):
    training, _ = run(tokens, tmp_path, steps=2)
    for step in (10, 20, 30, 40):
        training.done = step
        training.best = {"step": 10, "loss": 1.0}
        checkpoint.save(tmp_path, training.state(), training.model, training.step.optimizer)
    assert [int(p.name[5:]) for p in checkpoint.listed(tmp_path)] == [10, 30, 40]
    assert checkpoint.find(tmp_path).step == 40


def test_the_lowest_evaluation_is_the_best_and_kept(tokens, tmp_path, monkeypatch):
    found = iter([3.0, 2.0, 2.5, 2.0, 4.0])
    monkeypatch.setattr(Training, "evaluate", lambda self: next(found))
    training, records = run(
        tokens, tmp_path, steps=10, evaluate_every=2, checkpoint_every=0, keep=1
    )
    assert training.best == checkpoint.find(tmp_path).state["best"] == {"step": 4, "loss": 2.0}
    assert [int(p.name[5:]) for p in checkpoint.listed(tmp_path)] == [4, 10]
    assert [r["step"] for r in records if r["kind"] == "checkpoint"] == [2, 4, 10]
    again, _ = run(tokens, None, checkpoint.find(tmp_path), steps=10)
    assert again.best == training.best


def test_a_checkpoint_cut_short_is_no_checkpoint(tokens, tmp_path, monkeypatch):
    training, _ = run(tokens, tmp_path, steps=4)
    training.done = 9

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_replace_folder", fail)
    with pytest.raises(UsageError, match=r"step-00000009: cannot be written: No space left"):
        checkpoint.save(tmp_path, training.state(), training.model, training.step.optimizer)
    assert checkpoint.find(tmp_path).step == 4
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_checkpoint_of_earlier_versions_is_gpt2_s(tokens, tmp_path):
    training, _ = run(tokens, tmp_path, steps=2)
    (path,) = checkpoint.listed(tmp_path)
    kept = json.loads((path / "state.json").read_text())
    del kept["shape"]["family"], kept["sums"]
    for name in EARLIER:
        del kept["settings"][name]
    (path / "state.json").write_text(json.dumps(kept))
    (path / "SHA256SUMS").unlink()
    with pytest.warns(JetfireWarning, match="has no SHA256SUMS"):
        assert checkpoint.open_checkpoint(path).shape == training.model.shape


def test_a_checkpoint_of_llama_has_its_shape(tokens, tmp_path):
    training, _ = run(tokens, tmp_path, steps=2, **LLAMA)
    found = checkpoint.find(tmp_path).shape
    assert found == training.model.shape == LlamaShape(2, 2, 32, 16, 256, 0.0, 2, 64, False)


def test_another_shape_is_refused(tokens, tmp_path):
    run(tokens, tmp_path, steps=2)
    with pytest.raises(UsageError, match=r"tokens\.weight is \(256, 32\): the model's is"):
        run(tokens, saved=checkpoint.find(tmp_path), width=64)


HEAD = {
    "kind": "run",
    "settings": {"preset": "tiny", "recipe": "bf16", "seed": 0},
    "device": {"name": "a CPU", "processes": 1},
}


def step_record(step, loss=1.0):
    return {"kind": "step", "step": step, "loss": loss}


def test_a_log_is_only_added_to_and_read_as_if_it_had_gone_on(tmp_path):
    def add(*records):
        before = (tmp_path / log.NAME).read_bytes() if (tmp_path / log.NAME).exists() else b""
        journal = log.Log(tmp_path)
        for record in records:
            journal.write({**record, "cut": True} if record["kind"] == "resume" else record)
        journal.close()
        assert journal.path.read_bytes().startswith(before)
        return journal

    journal = add(HEAD, step_record(1), step_record(2), {"kind": "end", "step": 2})
    assert journal.empty
    assert not journal.cut
    with journal.path.open("a") as file:
        file.write('{"kind": "st')  # killed while it wrote
    assert [r.get("step") for r in log.read(tmp_path)] == [None, 1, 2, 2]
    again = {**HEAD, "kind": "resume", "step": 1}
    journal = add(again, step_record(2, loss=3.0))
    assert journal.cut
    assert not journal.empty
    assert [(r["kind"], r.get("step"), r.get("loss")) for r in log.read(tmp_path)] == [
        ("run", None, None),
        ("step", 1, 1.0),
        ("resume", 1, None),
        ("step", 2, 3.0),
    ]
    assert len(journal.path.read_text().splitlines()) == 7


def test_lines_of_a_log_that_are_none_are_told_and_passed_over(tmp_path):
    lines = [
        json.dumps(HEAD),
        "garbage",
        json.dumps(step_record(1)),
        "[]",
        '{"kind": 3}',
        '{"kind": "step", "step": 2, "loss": "low"}',
        json.dumps(step_record(3)),
    ]
    (tmp_path / log.NAME).write_text("\n".join(lines) + "\n")
    with pytest.warns(
        JetfireWarning, match=r"log\.jsonl: lines 2, 4, 5, 6 passed over: line 2: no"
    ):
        found = log.read(tmp_path)
    assert [r.get("step") for r in found] == [None, 1, 3]
    (tmp_path / log.NAME).write_text("\n".join(lines[:2]) + "\n")
    with pytest.warns(JetfireWarning) as told:
        log.read(tmp_path)  # a line that ends was not cut short
    reason = "no JSON: expected value at column 1"
    assert [str(one.message) for one in told] == [
        f"{tmp_path / log.NAME}: line 2 passed over: {reason}"
    ]
    (tmp_path / log.NAME).write_text(lines[2])
    with pytest.raises(UsageError, match='expected a first line of kind "run"'):
        log.read(tmp_path)


def test_a_log_writes_through_no_link_and_says_when_the_disk_is_full(tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / log.NAME).symlink_to("other")
    with pytest.raises(UsageError, match="cannot be written"):
        log.Log(tmp_path)
    assert (tmp_path / "other").read_text() == "mine"
    (tmp_path / log.NAME).unlink()
    journal = log.Log(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), journal._file.fileno())
    with pytest.raises(UsageError, match=r"log\.jsonl: cannot be written: No space left"):
        journal.write(HEAD)
    journal.close()  # which tries nothing again


# --- the command --------------------------------------------------------------------------------


def test_the_whole_way_on_the_command_line(text, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["tiny", "--recipe", "bf16", "--steps", "6", "--data", str(text), *SET]
    assert execute("train", [*words, "-o", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("tiny bf16: loss ")
    assert captured.out.count("\n") == 1
    assert "step      6  validation loss" in captured.err
    records = log.read(folder)
    first, *_, last = [loss for _, loss, _ in losses(records)]
    assert captured.out.startswith(f"tiny bf16: loss {first:.4f} → {last:.4f}, best validation")
    assert [r["kind"] for r in records] == [
        "run",
        *["step"] * 4,
        "evaluation",
        "checkpoint",
        "step",
        "step",
        "evaluation",
        "checkpoint",
        "end",
    ]
    assert records[0]["settings"]["width"] == 32
    assert (records[0]["runs_at_once"], len(records[0]["sources"])) == (1, 1)
    assert records[0]["sources"][0]["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert {"step", "loss", "norm", "rate", "ms", "tokens_per_s", "mfu", "peak_gib"} < set(
        records[1]
    )
    assert execute("train", [*words, "-o", str(folder)]) == 2
    assert "holds a run: --resume goes on with it" in capsys.readouterr().err

    assert execute("train", ["--resume", "-o", str(folder), "--set", "width=64"]) == 2
    assert "width=64: " in capsys.readouterr().err
    assert execute("train", ["--resume", "-o", str(folder), "--steps", "8"]) == 0
    assert [s for s, *_ in losses(log.read(folder))] == list(range(1, 9))

    assert execute("train", ["--resume", "-o", str(folder), "--steps", "5"]) == 2
    assert "is at step 8 already" in capsys.readouterr().err
    other = tmp_path / "other"
    again = [*words, "--init", str(folder), "-o", str(other), "--recipe", "int8-block32"]
    assert execute("train", again) == 0
    assert losses(log.read(other))[0][1] < losses(log.read(folder))[0][1] - 0.2
    capsys.readouterr()
    assert execute("train", ["sample", str(folder), "--prompt", "12 ", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith("12 ")
    assert execute("train", ["export", str(other), "-o", str(tmp_path / "theirs")]) == 0
    back = [*words, "--init", str(tmp_path / "theirs"), "-o", str(tmp_path / "back")]
    assert execute("train", [*back, "--sample", "5"]) == 0
    pages = ["loss.html"] if importlib.util.find_spec("plotly") else []
    for name in ("loss.svg", "loss.png", *pages):
        assert execute("train", ["plot", str(folder), str(other), "-o", str(tmp_path / name)]) == 0
    svg = (tmp_path / "loss.svg").read_text()
    assert "run: tiny bf16, best validation" in svg
    assert "other: tiny int8-block32" in svg


def test_a_llama_goes_the_whole_way(text, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    small = [*SET, "--set", ",".join(f"{name}={value}" for name, value in LLAMA.items())]
    words = ["tiny", "--recipe", "int8-block32", "--steps", "6", "--data", str(text), *small]
    assert execute("train", [*words, "-o", str(folder)]) == 0
    assert execute("train", ["--resume", "-o", str(folder), "--steps", "8"]) == 0
    head, *_ = log.read(folder)
    shape = checkpoint.find(folder).shape
    assert head["parameters"] == sum(map(math.prod, shape.parameters().values()))
    assert head["flops_per_token"] == shape.flops_per_token
    capsys.readouterr()
    assert execute("train", ["sample", str(folder), "--prompt", "12 ", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith("12 ")
    assert execute("train", ["export", str(folder), "-o", str(theirs)]) == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(theirs)
    assert loaded.num_parameters() == head["parameters"]
    back = [*words, "--init", str(theirs), "-o", str(tmp_path / "back")]
    assert execute("train", back) == 0
    assert losses(log.read(tmp_path / "back"))[0][1] < losses(log.read(folder))[0][1] - 0.2
    capsys.readouterr()
    other = ["tiny", "--data", str(text), *SET, "--init", str(folder)]
    assert execute("train", [*other, "-o", str(tmp_path / "other")]) == 2
    assert "the model's is" in capsys.readouterr().err


def test_an_int4_run_is_sampled_and_exported(text, tmp_path, capsys):
    """In BF16 and as transformers has it: without the steps."""
    folder = tmp_path / "run"
    words = ["tiny", "--steps", "2", "--data", str(text), *SET]
    one = [*words, "--recipe", "int4-hq-lss", "--set", "group=search", "-o", str(folder)]
    assert execute("train", one) == 0
    assert log.read(folder)[0]["settings"]["group"] == "search"
    capsys.readouterr()
    assert execute("train", ["sample", str(folder), "--prompt", "12 ", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("12 ")
    assert execute("train", ["export", str(folder), "-o", str(tmp_path / "theirs")]) == 0
    back = [*words, "--recipe", "int4-hq", "--init", str(tmp_path / "theirs")]
    assert execute("train", [*back, "-o", str(tmp_path / "back")]) == 0
    resumed = ["--resume", "-o", str(folder), "--steps", "3", "--recipe", "bf16"]
    assert execute("train", resumed) == 2
    assert "group=search with recipe=bf16: expected an INT4" in capsys.readouterr().err
    assert execute("train", [*resumed, "--set", "group=recipe"]) == 0


def test_other_tokens_are_refused_on_resume(text, tmp_path, capsys):
    copy, folder = tmp_path / "copy.txt", tmp_path / "run"
    copy.write_text(text.read_text())
    words = ["tiny", "--recipe", "bf16", "--steps", "2", "--data", str(copy), *SET]
    assert execute("train", [*words, "-o", str(folder)]) == 0
    copy.write_text(text.read_text()[::-1])
    capsys.readouterr()
    assert execute("train", ["--resume", "-o", str(folder)]) == 2
    assert "--resume needs the same tokens" in capsys.readouterr().err


def test_what_is_said_twice_alike_is_taken():
    settings = ["steps=5,recipe=bf16", "steps=5", "data=python,batch=2"]
    asked = TrainOptions("tiny", "bf16", settings, steps=5, data="python")
    expected = {"recipe": "bf16", "steps": 5, "batch": 2, "data": "python"}
    assert asked.begun() == make("tiny", expected)


def test_a_fault_is_one_line_and_exits_1(text, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["tiny", "--recipe", "bf16", "--steps", "4", "--data", str(text), *SET]
    bad = [w for w in words if "warmup" not in w]
    bad += ["--set", "rate=1e6,clip=0,warmup=0", "-o", str(folder)]
    assert execute("train", bad) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("jetfire: loss is ")
    assert "; first at " in message
    assert log.read(folder)[-1]["kind"] == "fault"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_run_writes_a_checkpoint(number, text, tmp_path, capsys, monkeypatch):
    launch, folder = Training._launch, tmp_path / "run"

    def interrupted(self, step):
        if step == 3:
            os.kill(os.getpid(), number)
        return launch(self, step)

    before = signal.getsignal(number)
    monkeypatch.setattr(Training, "_launch", interrupted)
    words = ["tiny", "--recipe", "bf16", "--steps", "9", "--data", str(text), *SET]
    assert execute("train", [*words, "-o", str(folder)]) == 130
    assert signal.getsignal(number) is before
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"jetfire: interrupted after step 3; --resume goes on from {folder}"
    assert checkpoint.find(folder).step == 3
    assert [step for step, *_ in losses(log.read(folder))] == [1, 2, 3]


def test_a_second_interrupt_ends_it_at_once(text, tmp_path, capsys, monkeypatch):
    def twice(self, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Training, "_launch", twice)
    words = ["tiny", "--recipe", "bf16", "--data", str(text), *SET, "-o", str(tmp_path / "run")]
    assert execute("train", words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "jetfire: interrupted"


def test_curves_compare_with_the_first():
    def curve(validation):
        return curves.Curve("a", [1, 2], [3.0, 2.0], [1, 2, 3], validation)

    steps, shares = curves.apart(curve([4.0, 2.0, 1.0]), curve([4.0, 2.1, 1.0]))
    assert steps == [1, 2, 3]
    assert shares == pytest.approx([0.0, 5.0, 0.0])
    assert curve([1, 1, 1]).smooth() == [3.0, 2.0]


def test_a_smoothed_curve_begins_at_its_first_losses_and_follows_the_rest():
    level = curves.Curve("a", list(range(200)), [5.0] * 200, [], [])
    assert level.smooth() == pytest.approx([5.0] * 200)
    fall = curves.Curve("a", list(range(200)), [5.0] * 100 + [1.0] * 100, [], []).smooth()
    assert fall[99] == pytest.approx(5.0)
    assert 1.0 < fall[102] < fall[100] < 5.0
    assert fall[-1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int8-block32", "int4-hq-lss"])
@pytest.mark.parametrize("how", ["false", "true"], ids=["eager", "graph"])
@pytest.mark.parametrize("sizes", [{}, {**LLAMA, "kv_heads": "1"}], ids=["gpt2", "llama"])
def test_resuming_repeats_the_losses_on_a_gpu(sizes, how, recipe, tokens, tmp_path):
    changes = {
        **sizes,
        "recipe": recipe,
        "dropout": 0.1,
        "keep": 3,
        "graph": how,
        "width": 128,
        "steps": 12,
        "deterministic": True,
    }
    with command.algorithms(settings_of(**changes)):
        _, whole = run(tokens, tmp_path, **changes)
        saved = checkpoint.open_checkpoint(tmp_path / "checkpoints" / "step-00000004")
        _, rest = run(tokens, saved=saved, **changes)
    assert losses(rest) == losses(whole)[4:]
    json.dumps(rest)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["false", "true"], ids=["eager", "graph"])
def test_watching_changes_no_bit_on_a_gpu(how, tokens, tmp_path):
    """The third step is captured, and those that are watched after it are replayed."""
    changes = {"recipe": "int8", "width": 128, "graph": how, "deterministic": True}
    with command.algorithms(settings_of(**changes)):
        check_watching_changes_nothing(tokens, tmp_path, **changes)


@pytest.mark.parametrize("text", ["1_6", "١٦", "9" * 5000])
def test_a_setting_is_a_number_of_plain_digits(text):
    for name in ("batch", "clip"):
        with pytest.raises(UsageError, match=rf"^{name}=.*: expected "):
            make("tiny", {name: text})
