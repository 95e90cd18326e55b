"""Converted models under `transformers`' Trainer and Accelerate: they train, save, resume, load."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi

import jetfire
from jetfire.nn import products

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("peft", reason="needs peft")

from jetfire.tests import forked  # noqa: E402
from jetfire.tests.processes import hugging_face as toy  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# Accelerate's own start. Without these words it has mpirun start two processes on a CPU.
ACCELERATE = [
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
]


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def evaluated(run, model=None):
    if model is not None:
        run = transformers.Trainer(model, run.args, eval_dataset=run.eval_dataset)
    return run.evaluate()["eval_loss"]


def trained(tmp_path, *names, **options):
    run = toy.trainer(tmp_path, *names, **options)
    run.train()
    return toy.losses(run), run


@cache
def floats(**options):
    """The losses of BF16, which those of each recipe are compared with."""
    with TemporaryDirectory() as folder:
        return trained(Path(folder), "gpt2", "bf16", 4, **options)[0]


@pytest.mark.parametrize("recipe", ["int8", "int4-hq-lss"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_trains_saves_and_loads_plainly(tmp_path, kind, recipe):
    """`transformers` reads the checkpoint as any other."""
    losses, run = trained(tmp_path, kind, recipe, layers=2)
    assert kind == "bert" or losses[-1] < losses[0] - 0.1
    run.save_model(str(tmp_path / "saved"))
    cls = type(run.model)
    plain, said = cls.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(said.values())
    assert not any("jetfire" in type(module).__module__ for module in plain.modules())
    bound = 0.05 if recipe == "int8" else 0.3
    assert evaluated(run, plain) == pytest.approx(evaluated(run), abs=bound)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"weight_decay": 0.1, "optim": "adamw_torch_fused"},
    ],
    ids=["accumulation", "bf16", "fused"],
)
@pytest.mark.parametrize("recipe", ["int8", "int4-hq-lss"])
def test_is_near_float(tmp_path, recipe, options):
    losses, _ = trained(tmp_path, "gpt2", recipe, 4, **options)
    exact = floats(**options)
    assert exact[-1] < exact[0] - 0.1
    assert losses == pytest.approx(exact, abs=0.03 if recipe == "int8" else 0.08)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["int8", "int4-hq-lss"])
def test_checkpointing_changes_no_bit(tmp_path, recipe, reentrant):
    kept = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    common = {"dropout": 0.1, "steps": 2}
    losses, run = trained(tmp_path, "gpt2", recipe, **common, **kept)
    expected, plain = trained(tmp_path, "gpt2", recipe, **common)
    assert losses == expected
    for found, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, other)


def test_logs_the_worst_layers_by_the_callback_of_the_documents(tmp_path):
    """By Trainer's own log, every second step; the losses are what they are without."""
    page = (Path(jetfire.__file__).parent / "docs" / "models.md").read_text()
    (block,) = (part for part in page.split("```python\n") if "TrainerCallback" in part)
    names: dict = {}
    exec(block.partition("```")[0], names)
    options = {"gradient_accumulation_steps": 2, "dropout": 0.1, "layers": 2}
    expected, _ = trained(tmp_path, "gpt2", "int8", 4, **options)
    run = toy.trainer(tmp_path, "gpt2", "int8", 4, **options)
    run.add_callback(names["Watching"](run, every=2))
    run.train()
    assert toy.losses(run) == expected
    seen = [
        {key: value for key, value in line.items() if key.startswith("sqnr/")}
        for line in run.state.log_history
        if any(key.startswith("sqnr/") for key in line)
    ]
    assert [len(line) for line in seen] == [3, 3]
    assert seen[0] != seen[1]
    layers = {name for name, _ in run.model.named_modules()}
    for key, value in (item for line in seen for item in line.items()):
        assert 15 < value < 50
        assert key.split("/")[2] in layers
    assert products.watchers == []


@pytest.mark.parametrize(("recipe", "backend"), [("int8", "aot_eager"), ("int4-hq-lss", "eager")])
def test_compiles(tmp_path, recipe, backend):
    """`aot_eager` makes of our operators what a compiler for GPUs gets, and draws as eager does.

    It adds floats in another order, and AdamW's first steps make much of the least gradients.
    """
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    losses, run = trained(tmp_path, "gpt2", recipe, 3, **compiled)
    expected, _ = trained(tmp_path, "gpt2", recipe, 3)
    assert hasattr(run.model_wrapped, "_orig_mod")
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    assert losses == pytest.approx(expected, abs=0.01 if recipe == "int8" else 0.05)


def resumed(folder, make):
    run = make(folder)
    run.train(resume_from_checkpoint=True)
    return toy.losses(run)


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    whole = toy.long_run(tmp_path / "whole")
    whole.train()
    folder = tmp_path / "killed"
    process = forked.start(toy.killed, folder)
    process.join(600)
    assert process.exitcode == 9
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{toy.SAVED}"]
    losses = resumed(folder, toy.long_run)
    assert len(losses) == toy.STEPS
    assert losses == toy.losses(whole)
    assert losses[-1] < losses[0] - 1
    plain, said = transformers.GPT2LMHeadModel.from_pretrained(
        folder / f"checkpoint-{toy.STEPS}", output_loading_info=True
    )
    assert not any(said.values())
    assert evaluated(whole, plain) == pytest.approx(evaluated(whole), abs=0.05)


def test_a_run_in_int4_goes_on(tmp_path):
    def make(folder):
        saved = {"save_strategy": "steps", "save_steps": 3}
        return toy.trainer(folder, "gpt2", "int4-hq-lss", 6, dropout=0.1, **saved)

    whole = make(tmp_path)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert resumed(tmp_path, make) == toy.losses(whole)


def test_pushes_what_loads(tmp_path, monkeypatch):
    """The hub is a folder here."""
    hub = tmp_path / "hub"

    def upload(self, *, folder_path, **options):
        shutil.copytree(folder_path, hub)

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **_: SimpleNamespace(repo_id=name))
    run = toy.trainer(tmp_path / "run", "gpt2", "int8", 1, hub_model_id="someone/toy")
    run.train()
    run.push_to_hub()
    found = transformers.GPT2LMHeadModel.from_pretrained(hub).state_dict()
    assert all(torch.equal(found[name], value) for name, value in run.model.state_dict().items())


# Two processes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The losses that two processes write, by what trains and how."""
    file = tmp_path_factory.mktemp("parallel") / "losses.json"
    subprocess.run(
        [sys.executable, "-m", *ACCELERATE, toy.__file__, str(file)],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(file.read_text())


def near(losses, recipe):
    """Each process draws its own rows and roundings; BF16's layers draw none."""
    return pytest.approx(losses, abs={"bf16": 1e-3, "int8": 0.05, "int4-hq-lss": 0.2}[recipe])


def test_two_processes_of_a_trainer_train_as_one(tmp_path, found):
    for recipe in toy.TRAINER:
        alone = toy.of_trainer(tmp_path, recipe, 1)
        assert alone[-1] < alone[0] - 0.5
        assert found["trainer"][recipe] == near(alone, recipe)


def test_two_processes_of_an_accelerator_train_as_one(found):
    found = found["accelerator"]
    for name, (recipe, _, adapters) in toy.ACCELERATOR.items():
        alone = toy.with_accelerate(recipe, False, adapters)
        assert alone[-1] < alone[0] - (0.02 if adapters else 0.5)
        assert found[name] == near(alone, recipe)
    assert found["fsdp adapters"] == pytest.approx(found["ddp adapters"], abs=1e-4)
