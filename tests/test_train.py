"""Training GPT-2: settings, the step, faults, checkpoints, the log, curves and the command."""

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetfire.cli import execute
from jetfire.gpt2 import checkpoint, command, curves, data, graph, log, utilisation
from jetfire.gpt2 import prepare as preparation
from jetfire.gpt2.parallel import Group
from jetfire.gpt2.settings import PRESETS, Settings, make, resumed
from jetfire.gpt2.step import Step, seed_step
from jetfire.gpt2.train import Training, build
from jetfire.ops.device import Device
from jetfire.ops.errors import JetfireError, UsageError

SMALL = {
    "layers": 2, "heads": 2, "width": 32, "context": 16, "batch": 4, "steps": 8, "warmup": 2,
    "evaluate_every": 4, "evaluate_batches": 2, "checkpoint_every": 4,
}  # fmt: skip
SET = [f"--set={name}={value}" for name, value in SMALL.items() if name != "steps"]
HERE = Device.parse("auto")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests share the cores: threads that wait for each other would spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def test_the_rate_rises_and_falls_to_the_floor():
    one = settings_of(steps=100, warmup=10, rate=1.0, floor=0.1)
    assert [one.rate_at(step) for step in (1, 10, 100)] == pytest.approx([0.1, 1.0, 0.1])
    assert one.rate_at(55) == pytest.approx(0.55)
    assert settings_of(steps=1, warmup=0).rate_at(1) > 0


USAGE = [
    ([], "which preset? expected one of tiny, shakespeare-char"),
    (["gpt9"], "no preset 'gpt9': expected one of tiny"),
    (["tiny", "--recipe", "fp4"], "no recipe 'fp4': expected one of bf16"),
    (["tiny", "--set", "rat=1"], "no setting 'rat' (did you mean rate?): expected one of preset"),
    (["tiny", "--set", "rate"], "--set rate: expected key=value"),
    (["tiny", "--set", "rate=x"], "rate=x: expected a number"),
    (["tiny", "--set", "rate=nan"], "rate=nan: expected a finite number"),
    (["tiny", "--set", "batch=0"], "batch=0: expected at least 1"),
    (["tiny", "--set", "batch=1.5"], "batch=1.5: expected an integer"),
    (["tiny", "--set", "dropout=1"], "dropout=1.0: expected 0 to 0.999"),
    (["tiny", "--set", "heads=3"], "width=128: expected a multiple of heads=3"),
    (["tiny", "--set", "compile=maybe"], "compile=maybe: expected true or false"),
    (["tiny", "--set", "group=3"], "group=3: expected one of recipe, search, 1, 2, 4"),
    (
        ["tiny", "--set", "group=64"],
        "group=64 with recipe=int8-block32: expected an INT4 recipe",
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
    (["tiny", "--set", "parallel=x"], "parallel=x: expected none or ddp or fsdp"),
    (["tiny", "--steps", "x"], "--steps x: expected an integer"),
    (["tiny", "--data", "/none"], "/none: no such file"),
    (["tiny", "--resume"], "--resume: expected -o RUN"),
    (["tiny", "--resume", "-o", "/none/run"], "--resume: /none/run holds no run"),
    (["tiny", "--nope"], "no option --nope: expected one of --recipe"),
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


def test_several_processes_steps_are_captured_only_split():
    step = SimpleNamespace(group=Group(0, 2), split=False)
    with pytest.raises(ValueError, match="only if it is split"):
        graph.GraphedStep(step)


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
    monkeypatch.setattr("jetfire.gpt2.step.autocast", lambda device: fp32(device.type))
    one, model, micro = model_and_batch(clip=0.1)
    _, twin, _ = model_and_batch()
    step = Step(model, one, HERE.torch_device)
    matrices = [p for p in twin.parameters() if p.dim() > 1]
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95),
    )  # fmt: skip
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
    {"recipe": "int8-block32"},
    {"recipe": "int4-hq-lss"},
    {"recipe": "int4-hq", "group": "search"},
    {"recipe": "int4-naive"},
]


# --- the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int4-hq-lss"])
def test_tiny_learns(recipe, tokens):
    """Enough of the preset's own 50 steps to have fallen by a nat."""
    begin = time.monotonic()
    records: list[dict] = []
    one = make("tiny", {"recipe": recipe, "steps": 12})
    Training(one, tokens, HERE, None, records.append).run()
    first, last = records[0], records[-2]
    assert last["kind"] == "step"
    assert last["loss"] < first["loss"] - 1.0
    assert records[-1]["kind"] == "evaluation"
    assert records[-1]["loss"] < first["loss"] - 1.0
    assert (time.monotonic() - begin) / 12 * 50 < 120


@pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: "-".join(changes.values()))
def test_resuming_repeats_the_losses(changes, tokens, tmp_path):
    changes = {**changes, "dropout": 0.1, "accumulate": 2, "keep": 3}
    _, whole = run(tokens, tmp_path, **changes)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-00000004", "step-00000008"]
    saved = checkpoint.open_checkpoint(tmp_path / "checkpoints" / "step-00000004")
    training, rest = run(tokens, saved=saved, **changes)
    assert losses(rest) == losses(whole)[4:]
    assert training.done == 8
    assert [r["loss"] for r in rest if r["kind"] == "evaluation"] == [whole[-1]["loss"]]


def test_one_recipe_goes_on_in_another(tokens, tmp_path):
    _, before = run(tokens, tmp_path, steps=4)
    saved = checkpoint.find(tmp_path)
    _, after = run(tokens, saved=saved, recipe="int8-block32")
    assert [step for step, *_ in losses(after)] == [5, 6, 7, 8]
    assert losses(after)[0][1] < losses(before)[0][1]


def test_int4_goes_on_from_any_recipe_and_back(tokens, tmp_path):
    """The first batch after BF16 sets the steps; what INT4 leaves goes on without them."""
    _, before = run(tokens, tmp_path, steps=4)
    middle, found = run(tokens, tmp_path, checkpoint.find(tmp_path), recipe="int4-hq-lss", steps=8)
    layer = middle.model.blocks[0].qkv
    assert bool(layer.calibration.all())
    assert layer.step_x.tolist() != [1.0]
    saved = checkpoint.find(tmp_path)
    assert {"blocks.0.qkv.calibration", "blocks.0.qkv.step_w"} < saved.model().keys()
    assert "blocks.0.qkv.step_w/exp_avg" in saved.optimizer()
    other, _ = run(tokens, None, saved, recipe="int4-naive", steps=9)
    assert torch.equal(other.model.blocks[0].qkv.calibration, layer.calibration)
    _, after = run(tokens, tmp_path, saved, steps=12)
    steps = losses(before) + losses(found) + losses(after)
    assert [step for step, *_ in steps] == list(range(1, 13))
    first, *_, last = [loss for _, loss, _ in steps]
    assert last < losses(found)[0][1] < first


FAULTS = [
    ("blocks.1.expand.weight", False, "loss is nan at step 6; first at blocks.1"),
    ("tokens.weight", False, "first at the loss, after the last block: tokens.weight holds NaN"),
    ("blocks.0.qkv.weight", True, "the gradient's norm is inf at step 6; first at "
     "blocks.0.qkv.weight: its gradient holds Inf"),
]  # fmt: skip


@pytest.mark.parametrize("recipe", ["bf16", "int8-block32", "int4-hq-lss"])
@pytest.mark.parametrize(("name", "gradient", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_fault_names_step_and_layer(name, gradient, says, recipe, tokens, tmp_path):
    records: list[dict] = []
    # No graph would call a hook that came after it.
    one = settings_of(recipe=recipe, graph="false" if gradient else "auto")
    training = Training(one, tokens, HERE, tmp_path, records.append)
    launch, parameter = training._launch, training.model.get_parameter(name)

    def broken(step):
        if step == 6 and gradient:
            parameter.register_hook(lambda g: torch.full_like(g, math.inf))
        elif step == 6:
            with torch.no_grad():
                parameter[0, 0] = math.nan
        return launch(step)

    training._launch = broken
    with pytest.raises(JetfireError, match="step-00000004") as raised:
        training.run()
    assert says in str(raised.value)
    assert raised.value.exit_code == 1
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert records[-1] == {"kind": "fault", "step": 6, "message": str(raised.value)}
    found = checkpoint.find(tmp_path)
    assert found is not None
    assert found.step == 4
    assert all(torch.isfinite(value).all() for value in found.model().values())


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


def test_flops_are_six_a_weight_and_attention():
    one = make("gpt2-124m", {})
    assert utilisation.flops_per_token(one, 50304) == pytest.approx(
        6 * (85e6 + 38.6e6) + 12 * 12 * 768 * 1024, rel=0.01
    )


# --- checkpoints and the log --------------------------------------------------------------------


def test_checkpoints_kept_are_the_last_and_the_best(tokens, tmp_path):
    training, _ = run(tokens, tmp_path, steps=2)
    for step in (10, 20, 30, 40):
        training.done = step
        training.best = {"step": 20, "loss": 1.0} if step >= 20 else None
        checkpoint.save(tmp_path, training.state(), training.model, training.step.optimizer)
    assert [int(p.name[5:]) for p in checkpoint.listed(tmp_path)] == [20, 30, 40]
    assert checkpoint.find(tmp_path).step == 40


def test_a_checkpoint_cut_short_is_no_checkpoint(tokens, tmp_path, monkeypatch):
    training, _ = run(tokens, tmp_path, steps=4)
    training.done = 9

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", fail)
        with pytest.raises(JetfireError, match=r"step-00000009: cannot be written.*No space left"):
            checkpoint.save(tmp_path, training.state(), training.model, training.step.optimizer)
    assert checkpoint.find(tmp_path).step == 4
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    checkpoint.tidy(tmp_path)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_another_shape_is_refused(tokens, tmp_path):
    run(tokens, tmp_path, steps=2)
    with pytest.raises(UsageError, match=r"tokens\.weight is \(256, 32\): the model's is"):
        run(tokens, saved=checkpoint.find(tmp_path), width=64)
    (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read"):
        run(tokens, saved=checkpoint.find(tmp_path))


def test_a_log_goes_on_after_its_checkpoint(tmp_path):
    journal = log.Log(tmp_path)
    assert journal.empty
    for record in ({"kind": "run"}, {"kind": "step", "step": 1}, {"kind": "step", "step": 2}):
        journal.write(record)
    journal.close()
    with journal.path.open("a") as file:
        file.write('{"kind": "st')  # killed while it wrote
    assert [r.get("step") for r in log.read(tmp_path)] == [None, 1, 2]
    again = log.Log(tmp_path, after=1)
    again.write({"kind": "step", "step": 2, "loss": 1.0})
    again.close()
    assert log.read(tmp_path)[1:] == [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "loss": 1.0},
    ]
    journal.path.write_text('{"kind": "run"}\nno\n{"kind": "step"}\n')
    with pytest.raises(UsageError, match=r"log\.jsonl:2: expected a JSON object"):
        log.read(tmp_path)


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
    assert [r["kind"] for r in records] == [
        "run", *["step"] * 4, "evaluation", "step", "step", "evaluation", "end"]  # fmt: skip
    assert records[0]["settings"]["width"] == 32
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


def test_two_processes_do_not_share_a_folder(text, tmp_path, capsys):
    run = command.Run(tmp_path / "run", settings_of())
    words = ["tiny", "--steps", "2", "--data", str(text), *SET, "-o", str(run.folder)]
    with run.held():
        assert execute("train", words) == 2
        assert "another process is training there" in capsys.readouterr().err
    assert not run.folder.exists()


def test_a_fault_is_one_line_and_exits_1(text, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["tiny", "--recipe", "bf16", "--steps", "4", "--data", str(text), *SET]
    bad = [*words, "--set", "rate=1e6,clip=0,warmup=0", "-o", str(folder)]
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


def test_a_run_without_a_checkpoint_begins_anew(text, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["tiny", "--recipe", "bf16", "--steps", "3", "--data", str(text), *SET]
    assert execute("train", [*words, "-o", str(folder)]) == 0
    first = losses(log.read(folder))
    shutil.rmtree(folder / "checkpoints")
    capsys.readouterr()
    assert execute("train", ["--resume", "-o", str(folder)]) == 0
    assert "has no checkpoint: beginning at its first step" in capsys.readouterr().err
    assert losses(log.read(folder)) == first


def test_curves_compare_with_the_first():
    def curve(validation):
        return curves.Curve("a", [1, 2], [3.0, 2.0], [1, 2, 3], validation)

    steps, shares = curves.apart(curve([4.0, 2.0, 1.0]), curve([4.0, 2.1, 1.0]))
    assert steps == [1, 2, 3]
    assert shares == pytest.approx([0.0, 5.0, 0.0])
    assert curve([1, 1, 1]).smooth() == [3.0, 2.0]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["int8-block32", "int4-hq-lss"])
@pytest.mark.parametrize("how", ["false", "true"], ids=["eager", "graph"])
def test_resuming_repeats_the_losses_on_a_gpu(how, recipe, tokens, tmp_path):
    changes = {"recipe": recipe, "dropout": 0.1, "keep": 3, "graph": how,
               "width": 128, "steps": 12}  # fmt: skip
    with command.algorithms(settings_of(**changes)):
        _, whole = run(tokens, tmp_path, **changes)
        saved = checkpoint.open_checkpoint(tmp_path / "checkpoints" / "step-00000004")
        _, rest = run(tokens, saved=saved, **changes)
    assert losses(rest) == losses(whole)[4:]
    json.dumps(rest)
