"""A user's training step as one CUDA graph: the same steps, and a line where that cannot be."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetfire.core.errors import UsageError
from jetfire.nn import AdamW, CapturedStep, captured, convert
from jetfire.nn.captured import LAUNCHED, release_all

SCRIPT = Path(__file__).parent / "processes" / "captured.py"
STEPS = LAUNCHED + 4


def model_of(device: torch.device, recipe: str = "int8-block32") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
    convert(model, recipe)
    return model.to(device)


def optimizer_of(model: nn.Module, kind: str, **options) -> torch.optim.Optimizer:
    if kind == "ours":
        return AdamW(model.parameters(), 1e-2, model=model, **options)
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True, **options)


# --- what cannot be captured --------------------------------------------------------------------


def test_a_cpu_has_no_graphs():
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"^parameters on cpu: expected one CUDA device$"):
        CapturedStep(print, torch.optim.SGD(model.parameters(), 0.1))


class _FailsAtItsEnd:
    """Ends as a capture does in which something went wrong."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_what_went_wrong_first_is_named(monkeypatch):
    """Neither that the capture has failed for it, nor what was handled before it began."""
    monkeypatch.setattr(torch.cuda, "graph", _FailsAtItsEnd)
    monkeypatch.setattr(captured, "_own_workspaces", nullcontext)
    monkeypatch.setattr(captured, "leave_capture", lambda _: None)

    def waits():
        raise RuntimeError("it waited\nfor the device")

    stream, said = SimpleNamespace(device=None), "in a CUDA graph: it waited$"
    try:
        raise KeyError("of before")
    except KeyError:
        with pytest.raises(UsageError, match=said), captured.captured(None, stream):
            waits()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the step")])
def test_what_is_not_torch_s_is_raised_as_it_is(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", _FailsAtItsEnd)
    monkeypatch.setattr(captured, "_own_workspaces", nullcontext)
    monkeypatch.setattr(captured, "leave_capture", lambda _: None)
    with (
        pytest.raises(type(error)) as raised,
        captured.captured(None, SimpleNamespace(device=None)),
    ):
        raise error
    assert raised.value is error


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_an_optimizer_must_be_capturable(device, kind):
    with pytest.raises(UsageError, match=r"^AdamW: expected it made with capturable=True$"):
        CapturedStep(print, optimizer_of(model_of(device), kind))


class Training:
    """Steps of a model on numbers that a seed draws."""

    def __init__(self, device: torch.device, kind: str = "ours", *, waits: bool = False) -> None:
        self.device, self.waits = device, waits
        self.model = model_of(device)
        self.optimizer = optimizer_of(self.model, kind, capturable=True)
        self.captured = CapturedStep(self.step, self.optimizer)

    def step(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        loss = scale * (self.model(x) - x).square().mean()
        if self.waits:
            loss.item()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn((32, 64), generator=torch.Generator().manual_seed(number)).to(
            self.device
        )

    def losses(self, take, *, evaluate: bool = False) -> list[float]:
        found = []
        for number in range(STEPS):
            if evaluate:
                with torch.no_grad():
                    self.model(self.batch(0))
            torch.manual_seed(number)
            found.append(take(self.batch(number))["loss"])
        return [float(loss) for loss in found]


@pytest.mark.gpu
@pytest.mark.parametrize("evaluate", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_steps_are_those_that_are_launched(device, kind, evaluate):
    """Of an evaluation between steps codes of weights are left, which no later step may read."""
    ours, theirs = Training(device, kind), Training(device, kind)
    losses = ours.losses(ours.captured, evaluate=evaluate)
    assert losses == theirs.losses(theirs.step)
    assert losses[-1] < losses[0]
    for mine, its in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    x = ours.batch(0)
    with torch.no_grad():
        assert torch.equal(ours.model.eval()(x), theirs.model.eval()(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_rate_that_is_a_tensor_follows_its_schedule(device, kind):
    found = []
    for replayed in (False, True):
        training = Training(device, kind)
        for group in training.optimizer.param_groups:
            group["lr"] = torch.tensor(1e-2, device=device)
        schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

        def take(x, training=training, schedule=schedule, replayed=replayed):
            said = (training.captured if replayed else training.step)(x)
            schedule.step()
            return said

        found.append(training.losses(take))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_what_is_returned_stays(device):
    training = Training(device)
    found = [training.captured(training.batch(number))["loss"] for number in range(STEPS)]
    kept = [float(loss) for loss in found]
    training.captured(training.batch(0))
    assert [float(loss) for loss in found] == kept
    assert len(set(kept)) == STEPS


@pytest.mark.gpu
def test_a_step_that_was_released_is_captured_anew(device):
    ours, theirs = Training(device), Training(device)
    ours.losses(ours.captured)
    theirs.losses(theirs.captured)
    release_all()
    assert ours.losses(ours.captured) == theirs.losses(theirs.step)


@pytest.mark.gpu
def test_other_graphs_leave_it_what_it_reads(device):
    """`reduce-overhead` frees cuBLAS's workspaces: a sum over many rows, split, has one."""
    model, same = nn.Linear(64, 128, device=device), nn.Linear(64, 128, device=device)
    same.load_state_dict(model.state_dict())
    x = torch.randn((16384, 64), device=device)

    def training_of(model):
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        optimizer.param_groups[0]["capturable"] = True  # it has nothing else that a graph minds

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return CapturedStep(step, optimizer), step

    (replayed, _), (_, launched) = training_of(model), training_of(same)
    for i in range(STEPS):
        assert torch.equal(replayed(), launched())
        other = torch.compile(lambda x, i=i: (x @ x.T + i).relu(), mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            other(x[:64])
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_arguments_are_those_of_the_capture(device):
    training = Training(device)
    training.losses(training.captured)
    x = training.batch(0)
    said = r"^16×64 float32: expected 32×64 float32, as captured$"
    with pytest.raises(UsageError, match=said):
        training.captured(x[:16])
    with pytest.raises(UsageError, match=r"^32×64 float64: expected 32×64 float32, as captured$"):
        training.captured(x.double())
    with pytest.raises(UsageError, match=r"^other arguments than were captured: expected as many"):
        training.captured(x, scale=2.0)
    other = Training(device)
    for _ in range(STEPS):
        other.captured(x, scale=2.0)
    with pytest.raises(UsageError, match=r"^3\.0: expected 2\.0, as captured$"):
        other.captured(x, scale=3.0)
    other.captured(x.cpu(), scale=2.0)  # is copied


@pytest.mark.gpu
def test_what_is_captured_is_on_the_device(device):
    training = Training(device)
    for number in range(LAUNCHED):
        training.captured(training.batch(number))
    with pytest.raises(UsageError, match=r"^a tensor on cpu: expected cuda:0, as captured$"):
        training.captured(training.batch(0).cpu())


@pytest.mark.gpu
def test_a_step_that_waits_is_named_and_others_go_on(device):
    training = Training(device, waits=True)
    with pytest.raises(UsageError, match=r"^the step cannot be captured in a CUDA graph: "):
        training.losses(training.captured)
    training.waits = False
    training.losses(training.step)


@pytest.mark.gpu
def test_graphs_that_draw_outlive_another_s_failure(device):
    ours, theirs, other = Training(device), Training(device), Training(device, waits=True)
    ours.losses(ours.captured)
    theirs.losses(theirs.step)
    with pytest.raises(UsageError, match="cannot be captured"):
        other.losses(other.captured)
    assert ours.losses(ours.captured) == theirs.losses(theirs.step)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["launched", "compiled"])
def test_two_processes_that_shard_a_model(how, tmp_path):
    """FSDP2's collectives are in the graph: losses are those of steps that are launched."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(SCRIPT), how, str(tmp_path / "found.pt")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert found["captured"] == found["launched"]
    assert found["captured"][-1] < found["captured"][0]
