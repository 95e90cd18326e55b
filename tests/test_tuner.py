"""The tuner finds a faster config, keeps it, and it is found again."""

import json

import pytest

from jetfire import ops
from jetfire.ops import profiles
from jetfire.ops.device import Device
from jetfire.ops.errors import UsageError
from jetfire.ops.run import choose
from jetfire.tuner import Tuner, Winner, save

optuna = pytest.importorskip("optuna", reason="the search needs Optuna")


@pytest.fixture
def tuner() -> Tuner:
    op = ops.get("gemm")
    here = Device.parse("cpu")
    return Tuner(op, ops.get_kernel("gemm", "int_mm"), op.Problem(64, 64, 64), here)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path))
    profiles.read.cache_clear()
    yield tmp_path
    profiles.read.cache_clear()


def test_search_measures_the_default_first_and_no_config_twice(tuner):
    seen = []
    winner = tuner.search(trials=4, budget_s=60, progress=seen.append)
    assert seen[0].config == tuner.kernel.default(tuner.problem, tuner.device)
    assert seen[0].outcome == "ok"
    assert len({t.config for t in winner.trials}) == len(winner.trials)
    assert winner.timing.ms <= winner.default.ms


def test_profile_round_trip(tuner, folder):
    winner = tuner.search(trials=1, budget_s=60)
    for _ in range(2):  # the second replaces the first
        file = save(tuner.kernel, tuner.problem, tuner.device, winner, folder)
    content = json.loads(file.read_text())
    assert content["schema"] == profiles.SCHEMA
    assert len(content["entries"]) == 1
    assert not list(folder.glob("**/*.tmp"))
    config, source = profiles.lookup(tuner.kernel, tuner.problem, tuner.device)
    assert (config, source) == (winner.config, "tuned")
    assert choose(tuner.op, tuner.problem, tuner.device)[1] == winner.config
    other = tuner.op.Problem(65, 64, 64)
    assert profiles.lookup(tuner.kernel, other, tuner.device)[1] == "default"


def test_a_corrupt_profile_is_named_and_skipped(tuner, folder):
    file = profiles.path(folder, tuner.device, "gemm")
    file.parent.mkdir(parents=True)
    file.write_text('{"schema": 99}')
    with pytest.warns(UserWarning, match="skipped: schema 99"):
        assert profiles.lookup(tuner.kernel, tuner.problem, tuner.device)[1] == "default"


def test_an_unwritable_folder_is_one_line(tuner, tmp_path):
    winner: Winner = tuner.search(trials=1, budget_s=60)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="cannot write profile"):
        save(tuner.kernel, tuner.problem, tuner.device, winner, blocked)


def test_a_config_that_raises_costs_one_trial(tuner, monkeypatch):
    class OutOfResources(Exception):
        """As Triton's: no RuntimeError."""

    def launch(*_):
        raise OutOfResources("shared memory")

    config = tuner.kernel.default(tuner.problem, tuner.device)
    monkeypatch.setattr(type(tuner.kernel), "launch", launch)
    trial = tuner.measure(config)
    assert (trial.outcome, trial.ms) == ("failed", None)
    assert trial.message == "OutOfResources: shared memory"
