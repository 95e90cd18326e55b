"""Whose a trial is, whether its tuner lives, and what names a study."""

import dataclasses
import datetime
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from jetfire.core import registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError
from jetfire.measure import provenance
from jetfire.tuner import study as studies
from jetfire.tuner.space import Space
from jetfire.tuner.strategies import STRATEGIES
from jetfire.tuner.study import Identity, Study
from jetfire.tuner.trial import Measurement

HOST = socket.gethostname()


KERNEL = registry.get_kernel("quantize", "triton")
DEVICE = target_device((9, 0))
PROBLEM = registry.get("quantize").Problem.parse({"m": 256, "n": 256, "block": 32})


def identity(**limits):
    space = Space.of(KERNEL, PROBLEM, DEVICE, limits)
    return Identity(KERNEL, PROBLEM, DEVICE, space, "time", "normal")


def opened(storage, strategy="random", trial_s=0.0, **limits):
    known = identity(**limits)
    return Study(known, STRATEGIES[strategy](known.space, 0, (), trial_s), storage, print, {})


def test_a_search_for_the_same_bits_is_another_one():
    known = identity()
    assert dataclasses.replace(known, same_bits=True).name != known.name
    assert dataclasses.replace(known, same_bits=False).name == known.name


def owned(owner, age=0.0):
    """A trial under way for some seconds."""
    began = datetime.datetime.now() - datetime.timedelta(seconds=age)
    return optuna.trial.FrozenTrial(
        number=0,
        state=optuna.trial.TrialState.RUNNING,
        value=None,
        datetime_start=began,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={"owner": owner},
        system_attrs={},
        intermediate_values={},
        trial_id=0,
    )


def is_dead(owner, age=0.0, local=True):
    return studies._is_dead(owned(owner, age), local=local)


@pytest.fixture
def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("database", [False, True], ids=["journal", "sqlite"])
@pytest.mark.parametrize("outcome", ["ok", "crash"])
def test_a_trial_that_another_tuner_gave_up_stays_so(tmp_path, database, outcome):
    storage = f"sqlite:///{tmp_path}/s.db" if database else str(tmp_path / "s.journal")
    slow, other = opened(storage), opened(storage)
    number, config = slow.ask()
    other._end(number, None)
    slow.finish(number, config, Measurement(outcome, 1.0 if outcome == "ok" else None))
    assert slow.finished() == [] == other.finished()
    number, config = slow.ask()
    slow.finish(number, config, Measurement("ok", 2.0))
    assert [m.ms for _, m in other.finished()] == [2.0]
    slow.give_up()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_what_lacked_time_is_asked_again(tmp_path, strategy):
    def of(trial_s):
        few = {"registers": ["255"], "warps": ["2", "4"]}
        return opened(str(tmp_path / "s.journal"), strategy, trial_s, **few)

    study = of(1.0)
    short = Measurement("timeout", seconds=1.1, limit=1.0)
    fates = {0: short, 1: Measurement("crash"), 2: Measurement("timeout", seconds=130.0)}
    tried = {}
    while not study.exhausted():
        number, config = study.ask()
        tried[number] = config
        study.finish(number, config, fates.get(number, Measurement("ok", 1.0 + number)))
    count = len(tried)
    assert of(1.0).exhausted()
    longer = of(2.0)
    assert (longer.taken(), longer.exhausted()) == (count - 1, False)
    number, config = longer.ask()
    assert config == tried[0]
    longer.finish(number, config, dataclasses.replace(short, limit=2.0))
    assert longer.exhausted()
    assert longer.taken() == count
    assert not of(3.0).exhausted()


def test_other_errors_of_a_trial_are_not_hidden(tmp_path, monkeypatch):
    study = opened(str(tmp_path / "s.journal"))
    number, config = study.ask()

    def fail(*_):
        raise RuntimeError("of another kind")

    monkeypatch.setattr(study, "_end", fail)
    with pytest.raises(RuntimeError, match="of another kind"):
        study.finish(number, config, Measurement("ok", 1.0))


def test_many_thousand_failures_fit_a_journal(tmp_path):
    """What a trial's tuner writes, the same command reads again."""
    study = opened(str(tmp_path / "s.journal"))
    number, config = study.ask()
    before = study.file.stat().st_size
    study.finish(number, config, Measurement("crash", message="x" * 1_000_000))
    text = study.file.read_bytes()
    assert (len(text) - before) * 10_000 < studies.MOST
    assert sum(map(text.count, (b",", b"[", b"{"))) * 10_000 < studies.MOST_VALUES
    assert opened(str(study.file)).finished()[0][1].message == "x" * studies.MESSAGE


def test_no_lock_is_left_and_none_follows_a_link(tmp_path):
    storage = str(tmp_path / "s.journal")
    opened(storage).ask()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "s.journal"]
    (tmp_path / "mine").write_text("my own")
    for name in ("s.journal.lock", "s.journal.ask.lock"):
        (tmp_path / name).symlink_to("mine")
        with pytest.raises(UsageError, match=f"cannot use study .*{name}: cannot be written"):
            opened(storage)
        (tmp_path / name).unlink()
    assert (tmp_path / "mine").read_text() == "my own"


def test_an_owner_is_alive_until_its_process_ends(ended):
    mine = studies._owner()
    assert not is_dead(mine)
    assert not is_dead(mine, age=1e6)
    assert is_dead(mine.replace(f":{os.getpid()}:", f":{ended}:"))
    host, pid, _, space = mine.split(":")
    if Path("/proc").exists():
        assert is_dead(f"{host}:{pid}:1:{space}")  # the number is another process's by now
    for number in ("0", "-1", "", "x", "9" * 30):
        assert is_dead(f"{host}:{number}:1:{space}")


def test_an_owner_of_an_older_tuner_is_understood(ended):
    began = studies._start_time(os.getpid())
    assert not is_dead(f"{HOST}:{os.getpid()}:{began}")
    assert is_dead(f"{HOST}:{ended}:{began}")
    assert not is_dead(f"other:{ended}:{began}", age=studies.ABANDONED_S - 60)
    assert is_dead(f"other:{os.getpid()}:{began}", age=studies.ABANDONED_S + 60)


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="Linux's")
def test_a_machine_that_was_started_anew_has_nobody_left():
    owner = f"{HOST}:{os.getpid()}:1:0d5e/{studies._process_space().partition('/')[2]}"
    assert is_dead(owner)
    # Behind a database it may be another machine of that name.
    assert not is_dead(owner, local=False)
    assert is_dead(owner, age=studies.ABANDONED_S + 60, local=False)


def test_a_container_of_the_same_name_is_another_machine(ended):
    boot = studies._process_space().partition("/")[0]
    for pid in (ended, os.getpid()):
        owner = f"{HOST}:{pid}:1:{boot}/4026530000"
        assert not is_dead(owner, age=studies.ABANDONED_S - 60)
        assert is_dead(owner, age=studies.ABANDONED_S + 60)


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="Linux's")
def test_the_process_space_is_of_the_namespace(monkeypatch):
    mine = studies._process_space()
    assert mine == studies._process_space() != ""
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[7]")
    assert studies._process_space() == f"{mine.partition('/')[0]}/7"


def test_without_proc_a_signal_tells(monkeypatch, ended):
    monkeypatch.setattr(studies, "_start_time", lambda _: None)
    monkeypatch.setattr(studies, "_process_space", lambda: "")
    mine = studies._owner()
    assert mine == f"{HOST}:{os.getpid()}:None:"
    assert not is_dead(mine)
    assert is_dead(f"{HOST}:{ended}:None:")

    def kill(pid, number):
        assert number == 0
        raise PermissionError(errno.EPERM, "another user's")

    monkeypatch.setattr(os, "kill", kill)
    assert not is_dead(mine)


OTHER = registry.get("quantize").Problem.parse({"m": 256, "n": 256, "block": 64})
NARROW = Space.of(KERNEL, PROBLEM, DEVICE, {"warps": ["4"]})


@pytest.mark.parametrize(
    "change", [{"data": "heavy"}, {"objective": "energy"}, {"problem": OTHER}, {"space": NARROW}]
)
def test_trials_that_do_not_compare_are_of_another_study(change):
    known = identity()
    assert dataclasses.replace(known, **change).name != known.name


@pytest.mark.parametrize("name", ["cuda", "torch", "triton"])
def test_an_upgrade_begins_another_study(monkeypatch, name):
    known = identity()
    before = known.name
    assert known.name == before
    versions = provenance.software()
    monkeypatch.setattr(provenance, "software", lambda: {**versions, name: "99.0"})
    assert known.name != before
    assert known.name.rpartition("-")[0] == before.rpartition("-")[0]
