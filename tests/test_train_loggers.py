"""TensorBoard and Weights & Biases as loggers of a run.

The libraries are stood in for. SummaryWriter(log_dir, purge_step=), add_scalar(tag, value, step)
and close() are torch's (2.13); init(project=, id=, resume=, name=, dir=, config=, settings=),
define_metric(name, step_metric=), log(data) and finish(exit_code=) are W&B's (0.31).
"""

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from jetfire.cli import execute
from jetfire.gpt2.training import log, loggers, options
from jetfire.gpt2.training.loop import Training

TINY = "tiny --recipe bf16 --device cpu --data x.txt -o run"
SIZES = "layers=1,width=32,heads=2,context=16,batch=4,checkpoint_every=2,evaluate_every=2"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text("The kernel runs on text. " * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JETFIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setattr(options, "check_logger", lambda name: None)


class FakeWriter:
    """What torch's SummaryWriter is told, of every one that is made."""

    def __init__(self, log_dir=None, *, purge_step=None):
        self.log_dir, self.purge_step, self.scalars, self.closed = log_dir, purge_step, [], False
        self.made.append(self)

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars.append((tag, scalar_value, global_step))

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    FakeWriter.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeWriter.made


class FakeRun:
    """What W&B's run is told."""

    def __init__(self, **given):
        self.given, self.logged, self.metrics, self.ended = given, [], [], None

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, data):
        self.logged.append(data)

    def finish(self, exit_code=None):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module in W&B's place, with the runs that it began."""
    module = ModuleType("wandb")
    module.runs = []

    def init(*, project, id, resume, name, dir, config, settings):
        given = {"project": project, "id": id, "resume": resume, "name": name, "dir": dir}
        module.runs.append(FakeRun(**given, config=config, settings=settings))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def train(*words, steps=3, sizes=SIZES):
    given = [*TINY.split(), "--set", sizes, "--steps", str(steps), *words]
    return execute("train", given)


def resume(*words):
    return execute("train", ["--resume", "-o", "run", "--device", "cpu", *words])


def test_tensorboard_gets_what_the_log_gets(writers, tmp_path):
    assert train("--logger", "tensorboard") == 0
    (writer,) = writers
    assert (writer.log_dir, writer.purge_step) == ("run/tensorboard", None)
    assert writer.closed
    told = {(name, step): value for name, value, step in writer.scalars}
    records = log.read(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        for name in ("loss", "norm", "rate", "ms", "tokens_per_s"):
            assert told.pop((f"train/{name}", record["step"])) == record[name]
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "evaluation"}
    assert told == {("validation/loss", step): loss for step, loss in losses.items()}
    assert list(losses) == [2, 3]


def test_a_run_that_goes_on_does_so_in_the_same_place(writers, wandb):
    both = ["--logger", "tensorboard,wandb"]
    assert train(*both, steps=2) == 0
    assert resume("--steps", "4", *both) == 0
    first, second = writers
    assert second.log_dir == first.log_dir
    assert second.purge_step == 3
    assert [step for name, _, step in second.scalars if name == "train/loss"] == [3, 4]
    begun, again = wandb.runs
    assert again.given["id"] == begun.given["id"]
    assert begun.given["resume"] == "allow"
    assert [data["step"] for data in again.logged] == [3, 4, 4]
    # Another run is another one there, too.
    assert train("--logger", "wandb", "-o", "other") == 0
    assert wandb.runs[-1].given["id"] != begun.given["id"]


def test_wandb_knows_the_run_its_settings_and_our_steps(wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert train("--logger", "wandb", "--quiet") == 0
    (run,) = wandb.runs
    assert (run.given["project"], run.given["name"], run.given["dir"]) == ("mine", "run", "run")
    assert run.given["config"]["width"] == 32
    assert run.given["settings"] == {"console": "off", "silent": True}
    assert run.metrics == [("*", "step")]
    assert run.logged[0].keys() >= {"step", "train/loss", "train/norm", "train/rate"}
    assert all(isinstance(x, int | float) for data in run.logged for x in data.values())
    assert run.ended == 0


def test_what_is_watched_has_a_figure_for_each_layer():
    codes = {"sqnr": 40.0, "zeros": 0.1, "clipped": 0.0, "largest": None}
    layers = {"blocks.0.expand": {"weight": codes, "gradient": {**codes, "sqnr": 20.0}}}
    record = {"kind": "watch", "step": 5, "worst": {}, "layers": layers}
    assert loggers.figures(record) == {
        "watch/sqnr/weight/blocks.0.expand": 40.0,
        "watch/zeros/weight/blocks.0.expand": 0.1,
        "watch/clipped/weight/blocks.0.expand": 0.0,
        "watch/sqnr/gradient/blocks.0.expand": 20.0,
        "watch/zeros/gradient/blocks.0.expand": 0.1,
        "watch/clipped/gradient/blocks.0.expand": 0.0,
    }
    assert loggers.figures({"kind": "checkpoint", "step": 5}) == {}


def test_a_logger_that_fails_is_left_out_and_said_once(wandb, capsys, tmp_path, monkeypatch):
    def failing(self, data):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(FakeRun, "log", failing)
    assert train("--logger", "wandb") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "--logger" in line]
    assert said == [
        "jetfire: --logger wandb: the run goes on without it: ConnectionError: no route to host"
    ]
    assert log.read(tmp_path / "run")[-1]["kind"] == "end"


def test_one_that_cannot_begin_ends_the_command_before_the_run(wandb, capsys, tmp_path):
    def init(**given):
        raise RuntimeError("api_key not configured\n(no-tty)")

    wandb.init = init
    assert train("--logger", "wandb") == 2
    said = "jetfire: --logger wandb: RuntimeError: api_key not configured (no-tty)\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run" / "settings.json").exists()


def test_a_run_that_fails_is_said_to_have(wandb, writers, monkeypatch):
    def step(self, step):
        raise OSError("the GPU fell off")

    monkeypatch.setattr(Training, "_launch", step)
    assert train("--logger", "wandb,tensorboard") != 0
    assert wandb.runs[0].ended == 1
    assert writers[0].closed


def test_a_name_from_elsewhere_is_refused(wandb, tmp_path, capsys):
    assert train(steps=2) == 0
    (tmp_path / "run" / "wandb.json").write_text(json.dumps({"id": "../x"}))
    assert resume("--steps", "3", "--logger", "wandb") == 2
    assert "run/wandb.json: id='../x': expected letters" in capsys.readouterr().err
    assert wandb.runs == []


def test_each_logger_is_refused_without_loading_torch():
    assert set(options.LOGGERS) == set(loggers.LIBRARIES)


@pytest.mark.parametrize("name", options.LOGGERS)
def test_a_library_that_is_not_there_is_one_line(name, monkeypatch, capsys):
    monkeypatch.undo()
    for found in (None, SimpleNamespace(origin=None)):  # or a folder that the library left
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=found: found)
        assert execute("train", ["tiny", "--logger", name]) == 2
        wanted = f"pip install 'jetfire[{name}]'"
        said = f"jetfire: --logger {name}: needs {name}, which is not installed: {wanted}\n"
        assert capsys.readouterr().err == said


def test_tensorboard_itself_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = ["--logger", "tensorboard"]
    assert train(*logger, steps=4) == 0
    for folder in sorted((tmp_path / "run" / "checkpoints").iterdir()):
        if folder.name.endswith("4"):  # as after a kill between checkpoints
            folder.rename(tmp_path / folder.name)
    assert resume(*logger) == 0
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    steps = [event.step for event in read.Scalars("train/loss")]
    assert steps == [1, 2, 3, 4]
