"""What a search must survive: faulty kernels, kills, full disks, broken studies, rivals."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import filelock
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

FAULTS = Path(__file__).parent / "faults"
sys.path.insert(0, str(FAULTS))  # workers are given it

import faulty  # noqa: E402
from faulty import FaultyConfig, FaultyCudaConfig  # noqa: E402

from jetfire import cli  # noqa: E402
from jetfire.core import profiles, registry  # noqa: E402
from jetfire.core.device import Device  # noqa: E402
from jetfire.core.errors import WrongResultError  # noqa: E402
from jetfire.core.processes import Worker  # noqa: E402
from jetfire.tests import forked  # noqa: E402
from jetfire.tuner import command  # noqa: E402
from jetfire.tuner import device as device_module  # noqa: E402
from jetfire.tuner import session as session_module  # noqa: E402
from jetfire.tuner import worker as workers_module  # noqa: E402
from jetfire.tuner.device import DeviceRunner  # noqa: E402
from jetfire.tuner.recording import ReplayRunner  # noqa: E402
from jetfire.tuner.search import Limits, decide, search  # noqa: E402
from jetfire.tuner.space import Space  # noqa: E402
from jetfire.tuner.strategies import STRATEGIES  # noqa: E402
from jetfire.tuner.study import Identity, StorageError, Study  # noqa: E402
from jetfire.tuner.trial import Measurement, RunnerError  # noqa: E402
from jetfire.tuner.worker import Job  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
OP = registry.get("transpose")
PROBLEM = OP.Problem(m=32, n=32, block=32)
CPU = Device.parse("cpu")
COMMON = (
    "transpose",
    "--kernel",
    "faulty",
    "--m",
    "32",
    "--block",
    "32",
    "--device",
    "cpu",
    "--peer",
    "none",
    "--trial-timeout",
    "1s",
)
GOOD = ("--space", "fault=none")
LONG = 900.0  # seconds: nothing waits for so long on any machine, but for what hangs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Profiles, studies and temporary files of a test's own; the faulty kernels are there."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path / "studies"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setitem(registry.kernels("transpose"), "faulty", faulty.KERNEL)
    monkeypatch.setitem(registry.kernels("transpose"), "faulty_cuda", faulty.KERNEL_CUDA)
    forked.fork_workers(monkeypatch)
    profiles.forget()
    yield tmp_path
    profiles.forget()


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "kept" / "study.journal"


def start(*arguments, **options):
    """The command in a process group of its own, forked, as are its workers."""
    return forked.Command("tune", [*COMMON, *arguments], **options)


def end(process):
    """Exit code and lines on stderr."""
    code, _, errors = process.end(LONG)
    assert "Traceback" not in errors, errors
    return code, errors.splitlines()


class Spawned:
    """The command, started by Python as a terminal would start it; it spawns its workers."""

    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, str(FAULTS / "run.py"), *COMMON, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def end(self, limit_s):
        try:
            out, errors = self._process.communicate(timeout=limit_s)
        finally:
            self._process.kill()
        return self._process.returncode, out, errors


def tune(capsys, *arguments):
    """The command in this process: exit code, stdout, lines on stderr."""
    code = cli.execute("tune", [*COMMON, *map(str, arguments)])
    out, errors = capsys.readouterr()
    assert "Traceback" not in errors, errors
    return code, out, errors.splitlines()


def opened(journal):
    return JournalStorage(JournalFileBackend(str(journal)))


def trials(storage):
    """The trials of the only study there is."""
    if isinstance(storage, Path):
        storage = opened(storage)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).get_trials()


def outcomes(storage):
    """Params as text → outcome; a config that has two fails here."""
    found = [
        (json.dumps(t.params), t.user_attrs["outcome"])
        for t in trials(storage)
        if "outcome" in t.user_attrs
    ]
    assert max(Counter(params for params, _ in found).values(), default=1) == 1
    return dict(found)


def running(storage):
    return [t.number for t in trials(storage) if t.state == TrialState.RUNNING]


def entries(tmp_path):
    """What all profiles in the user's folder hold."""
    files = list((tmp_path / "profiles").rglob("*.json"))
    return [entry for file in files for entry in json.loads(file.read_text())["entries"]]


def until(condition, every=0.02):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(every)


def measured(journal):
    return journal.read_bytes().count(b'"outcome"') if journal.exists() else 0


# Faults of kernels, through the command.

TYPED = {
    "none": ("ok", ""),
    "hang": ("timeout", "took over 3 s to check and time"),
    "segfault": ("crash", "signal 11\nthe kernel's last words\nFatal Python error: Segmentation"),
    "exit": ("crash", "worker ended by exit code 7"),
    "raise": ("crash", "RuntimeError: first line\nsecond line"),
    "compile": ("compile", "CompilationError: at 1:2: no such thing"),
    "memory": ("crash", "MemoryError: 9 PiB asked for"),
    "oom": ("crash", "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 PiB"),
    "wrong": ("wrong", "qt: 1024 of 1024 differ"),
    "illegal": ("illegal", "UsageError: the launcher knew better"),
}


def test_a_fault_costs_one_trial(capsys, tmp_path, journal):
    fields = (
        f"--space=fault={','.join(TYPED)}",
        "--space=ms=1",
        "--space=tile=1,13",
        "--trial-timeout",
        "3s",
    )
    code, _, errors = tune(capsys, *fields, "--storage", journal)
    assert code == 0, errors[-3:]
    assert len(outcomes(journal)) == len(TYPED)  # tile 13 is never asked for
    found = {t.params["fault"]: t for t in trials(journal) if "outcome" in t.user_attrs}
    log = next((tmp_path / "studies").rglob("*.log")).read_text()
    for fault, (outcome, message) in TYPED.items():
        attributes = found[fault].user_attrs
        assert attributes["outcome"] == outcome, fault
        assert message in attributes["message"], fault
        assert attributes["message"] in log
    (entry,) = entries(tmp_path)
    assert entry["config"]["fault"] == "none"
    assert not list((tmp_path / "tmp").iterdir())
    # The same command has nothing left to try.
    code, _, errors = tune(capsys, *fields, "--storage", journal, "--trials", len(TYPED))
    assert code == 0, errors[-3:]
    assert "tuned already, 10 trials" in errors[-1]
    assert len(outcomes(journal)) == len(TYPED)


def test_a_spawned_worker_s_last_words_are_kept_too(monkeypatch):
    monkeypatch.undo()  # what forks it
    with runner_on(trial_s=LONG) as runner:
        (found,) = measure(runner, FaultyConfig("segfault"))
    outcome, message = TYPED["segfault"]
    assert (found.outcome, message in found.message) == (outcome, True), found


@pytest.mark.parametrize("fault", ["wrong", "raise"])
def test_nothing_right(capsys, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("FAULTY_DEFAULT", fault)
    code, _, errors = tune(
        capsys,
        f"--space=fault={fault}",
        "--space=ms=1",
        "--space=tile=1,2",
        "--trial-timeout",
        "30s",
    )
    assert code == 3
    assert "no config is right" in errors[-2 if fault == "raise" else -1]  # it has a second line
    assert entries(tmp_path) == []


def test_nothing_in_time_exits_6_and_more_time_mends_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTY_DEFAULT", "hang")
    words = ["--space=fault=hang", "--space=ms=1", "--space=tile=1,2"]
    code, _, errors = tune(capsys, *words)
    assert code == 6
    assert "no config was done in 1 s: give a longer --trial-timeout" in errors[-1]
    assert entries(tmp_path) == []
    # What hung for a second is tried again where it has more.
    monkeypatch.setenv("FAULTY_HANG_S", "0")
    code, _, errors = tune(capsys, *words, "--trial-timeout", "3s")
    assert code == 0, errors
    assert len(entries(tmp_path)) == 1


def test_what_lacked_time_is_tried_again_with_more(capsys, journal, monkeypatch):
    words = ["--space=fault=none,hang", "--space=ms=1", "--space=tile=1,2", "--storage", journal]
    monkeypatch.setenv("FAULTY_HANG_S", "1.5")
    code, _, errors = tune(capsys, *words)
    assert code == 0, errors
    assert sorted(outcomes(journal).values()) == ["ok", "ok", "timeout", "timeout"]
    code, _, errors = tune(capsys, *words)
    assert code == 0, errors
    assert "tuned already, 4 trials" in errors[-1]
    # All but what they hang for is done in the same time.
    monkeypatch.setenv("FAULTY_HANG_S", "0")
    code, _, errors = tune(capsys, *words, "--trials", 4, "--trial-timeout", "20s")
    assert code == 0, errors
    again = [t for t in trials(journal) if t.number >= 4]
    assert [(t.params["fault"], t.user_attrs["outcome"]) for t in again] == [("hang", "ok")] * 2
    code, _, errors = tune(capsys, *words, "--trials", 4, "--trial-timeout", "20s")
    assert code == 0, errors
    assert "tuned already, 6 trials" in errors[-1]


def test_a_budget_in_which_nothing_is_tried_exits_6(capsys, tmp_path):
    code, _, errors = tune(capsys, "--budget", "1s")
    assert code == 6
    assert errors[-1] == (
        "jetfire: no config was tried within the budget: 1 of 1 search left; give a higher --budget"
    )


# Workers.


def runner_on(device=CPU, kernel=faulty.KERNEL, trial_s=1.0, **options):
    runner = DeviceRunner([device], trial_s, **options)
    runner.begin(Job(OP, kernel, PROBLEM, 0, "normal", False, ()))
    return contextlib.closing(runner)


def measure(runner, *configs):
    """Each config's outcome, all submitted at once."""
    found = {}
    for number, config in enumerate(configs):
        runner.submit(number, config)
    while len(found) < len(configs):
        done = runner.wait(LONG)
        assert done
        found.update(done)
    return [found[number] for number in range(len(configs))]


def kill_worker(runner):
    runner._measuring[0].worker._process.kill()
    runner._measuring[0].worker._process.join()


def test_a_killed_worker_costs_at_most_its_trial():
    with runner_on(trial_s=LONG) as runner:
        runner.submit(0, FaultyConfig("hang"))
        until(lambda: runner.wait(0.1) or runner._measuring[0].task.ready)
        kill_worker(runner)
        ((number, found),) = runner.wait(LONG)
        assert (number, found.outcome) == (0, "crash")
        assert "worker ended by signal 9" in found.message
        assert measure(runner, FaultyConfig())[0].outcome == "ok"
        kill_worker(runner)  # while it has nothing to do
        assert measure(runner, FaultyConfig())[0].outcome == "ok"


@pytest.mark.parametrize(("dies", "says"), [(False, "others hold it all"), (True, "exit code 5")])
def test_what_cannot_be_set_up_is_no_configs_fault(journal, dies, says):
    study = Study(
        identity(), STRATEGIES["random"](identity().space, 0, ()), str(journal), print, {}
    )
    with contextlib.closing(DeviceRunner([CPU], 1.0)) as runner:
        runner.begin(Job(faulty.Unprepared(dies), faulty.KERNEL, PROBLEM, 0, "normal", False, ()))
        with pytest.raises(RunnerError, match=says):
            search(study, runner, Limits(5, math.inf), lambda *_: None)
        assert study.finished() == []
        assert running(journal) == []
        # With another job the same workers go on.
        runner.begin(Job(OP, faulty.KERNEL, PROBLEM, 0, "normal", False, ()))
        assert measure(runner, FaultyConfig())[0].outcome == "ok"


def test_several_devices_measure_at_once():
    with contextlib.closing(DeviceRunner([CPU, CPU], LONG)) as runner:
        runner.begin(Job(OP, faulty.KERNEL, PROBLEM, 0, "normal", False, ()))
        for number in range(3):
            runner.submit(number, FaultyConfig(ms=30, tile=number + 1))
        tasks = [seat.task for seat in runner._measuring]
        assert [task.number for task in tasks if task] == [0, 1]
        assert len({seat.worker._process.pid for seat in runner._measuring}) == 2
        found = {}
        while len(found) < 3:
            found.update(runner.wait(LONG))
    assert [found[number].outcome for number in range(3)] == ["ok", "ok", "ok"]


def test_compilers_that_fail(monkeypatch):
    monkeypatch.setattr(device_module, "COMPILE_S", 1.0)
    device = Device("cpu", name="a CPU for which there is a compiler", capability=(9, 0))
    names = ("compiler_raises", "compiler_dies", "compiler_hangs", "none")
    with runner_on(device, compilers=2) as runner:
        raises, dies, hangs, good = measure(runner, *(FaultyConfig(fault) for fault in names))
    assert (raises.outcome, dies.outcome, hangs.outcome) == ("compile", "compile", "timeout")
    assert raises.message == "CompilationError: ptxas: line 1\nptxas: line 2"
    assert dies.message == "worker ended by exit code 9"
    assert hangs.message == "took over 1 s to compile"
    assert not hangs.lacked_time(LONG)  # a longer --trial-timeout leaves compilers what they have
    assert good.outcome == "ok"


def test_a_final_comparison_that_crashes_leaves_out_the_culprit():
    crashing, good = FaultyConfig("exit"), FaultyConfig(tile=2)
    with runner_on() as runner:
        final = decide(
            runner, [good, FaultyConfig("raise")], crashing, crashing, False, "time", 1.0
        )
        assert final.config == good
        assert final.default is None
        assert {"ended by exit code 7" in r or "first line" in r for r in final.failed.values()}
        with pytest.raises(WrongResultError, match="ended by exit code 7"):
            decide(runner, [], crashing, crashing, False, "time", 1.0)
        hanging = FaultyConfig("hang")
        final = decide(runner, [good], hanging, hanging, False, "time", 1.0, {hanging: "slow"})
        assert list(final.failed.values()) == ["slow"]


@pytest.mark.gpu
def test_faults_of_a_gpu():
    """An endless kernel and a bad address cost a trial each; the configs after them are right."""
    good, other = FaultyCudaConfig(), FaultyCudaConfig(threads=64)
    illegal = FaultyCudaConfig("illegal")
    faults = [FaultyCudaConfig(fault) for fault in ("hang", "illegal", "wrong")]
    with runner_on(Device.parse("cuda:0"), faulty.KERNEL_CUDA, 5.0, compilers=0) as runner:
        configs = [good, *(c for fault in faults for c in (fault, good))]
        first, hang, second, bad_address, third, wrong, last = measure(runner, *configs)
        assert {m.outcome for m in (first, second, third, last)} == {"ok"}
        assert hang.outcome == "timeout"
        assert bad_address.outcome == "crash"
        assert "illegal memory access" in bad_address.message
        assert wrong.outcome == "wrong"
        final = decide(runner, [good, other], illegal, illegal, False, "time", 1.0)
        assert final.default is None
        assert final.config.fault == "none"
        assert "illegal memory access" in final.failed[illegal]


# Disks and files.


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk(tmp_path, journal):
    arguments = (*GOOD, "--space=ms=1,2", "--trials", 30, "--storage", journal)
    code, errors = end(start(*arguments, before=limited))
    assert code == 2
    assert errors[-1] == f"jetfire: cannot use study {journal}: File too large"
    assert len(entries(tmp_path)) == 1
    before = outcomes(journal)
    assert 2 < len(before) < 30
    code, errors = end(start(*arguments))
    assert code == 0, errors[-3:]
    after = outcomes(journal)
    assert before.items() <= after.items()
    assert len(after) == 30
    assert running(journal) == []


def test_no_place_for_a_profile(capsys, tmp_path, monkeypatch, journal):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "file"))
    arguments = (*GOOD, "--space=ms=1", "--trials", 3, "--storage", journal)
    code, _, errors = tune(capsys, *arguments)
    assert code == 2
    assert f"{tmp_path / 'file'}" in errors[-1]


def identity():
    space = Space.of(faulty.KERNEL, PROBLEM, CPU, {"fault": ["none"], "ms": ["1"]})
    return Identity(faulty.KERNEL, PROBLEM, CPU, space, "time", "normal")


def some_trials(journal, count, notes=None):
    """Search on, without a device, until there are so many trials."""
    known = identity()
    strategy = STRATEGIES["random"](known.space, 0, ())
    study = Study(known, strategy, str(journal), (notes if notes is not None else []).append, {})
    points = known.space.points()
    recorded = {known.space.config(p): Measurement("ok", 1.0 + p[2], seconds=0.1) for p in points}
    search(study, ReplayRunner(recorded), Limits(count, 1e9), lambda *_: None)
    return study


def test_a_corrupt_study_goes_on_from_the_lines_before(journal):
    some_trials(journal, 8)
    before, lines = outcomes(journal), journal.read_bytes().splitlines(keepends=True)
    lines[len(lines) // 2] = b"\x00\xff garbage\n"
    broken = b"".join(lines).replace(b":%d:" % os.getpid(), b":999999999:")  # of one who died
    journal.write_bytes(broken)
    notes = []
    some_trials(journal, 8, notes)
    (aside,) = journal.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == broken
    line = len(lines) // 2 + 1
    assert notes == [
        f"study {journal}: line {line} is corrupt: goes on from the lines before it; "
        f"the whole file is kept as {aside.name}"
    ]
    after = outcomes(journal)
    assert len(after) == 8
    assert len(before.items() & after.items()) >= 2
    assert running(journal) == []


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_cut(journal, cut):
    some_trials(journal, 4)
    content = journal.read_bytes()
    journal.write_bytes(content + content.splitlines()[-1][:cut])
    notes = []
    some_trials(journal, 6, notes)
    assert notes == []
    assert not list(journal.parent.glob("*.corrupt-*"))
    assert len(outcomes(journal)) == 6
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_line_torn_by_another_tuner_is_not_joined(journal):
    study = some_trials(journal, 4)
    with journal.open("ab") as file:
        file.write(b'{"op_code": 8, "wor')
    number, config = study.ask()
    study.finish(number, config, Measurement("ok", 1.0))
    assert len(outcomes(journal)) == 5


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01\x01\x00\n\x00rest\n", b"no line end"])
def test_other_files_than_journals_are_kept(journal, content):
    journal.parent.mkdir(parents=True)
    journal.write_bytes(content)
    some_trials(journal, 3)
    assert len(outcomes(journal)) == 3
    assert [file.read_bytes() for file in journal.parent.glob("*.corrupt-*")] == [content] * (
        len(content) > 0
    )


@pytest.mark.parametrize("content", ['{"a": 1}\n', '{"op_code": 8}\n', '{"op_code": 99}\n'])
def test_json_that_is_not_optunas(capsys, journal, content):
    journal.parent.mkdir(parents=True)
    journal.write_text(content)
    code, _, errors = tune(capsys, *GOOD, "--storage", journal)
    assert code == 2
    assert len(errors) == 1
    assert f"study {journal} is no journal of Optuna's" in errors[0]
    assert journal.read_text() == content


def test_a_folder_or_a_file_in_the_way(capsys, tmp_path, journal):
    journal.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for place in (journal, tmp_path / "file", tmp_path / "file" / "x.journal"):
        code, _, errors = tune(capsys, *GOOD, "--storage", place)
        assert code == 2
        assert len(errors) == 1
        assert re.search(f"cannot use study {tmp_path}.*: (Is a|Not a|File)", errors[0])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(capsys, journal):
    journal.parent.mkdir(parents=True)
    journal.write_text("")
    journal.chmod(0o400)
    code, _, errors = tune(capsys, *GOOD, "--storage", journal)
    assert code == 2
    assert errors == [f"jetfire: cannot use study {journal}: Permission denied"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("foo://bar", "Can't load plugin: sqlalchemy.dialects:foo"),
        ("sqlite:////no/such/folder/x.db", "unable to open database file"),
        ("postgresql+nodriver://me:secret@127.0.0.1:1/x", "nodriver"),
    ],
)
def test_a_database_that_cannot_be_used(capsys, url, says):
    code, _, errors = tune(capsys, *GOOD, "--storage", url)
    assert code == 2
    assert len(errors) == 1
    assert f"cannot open --storage {url.replace('secret', '***')}: " in errors[0]
    assert says in errors[0]
    assert "secret" not in errors[0]


def test_an_unwritable_log_is_named(journal, monkeypatch, tmp_path):
    study = some_trials(journal, 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=f"cannot write log {tmp_path / 'file'}"):
        search(study, ReplayRunner({}), Limits(3, 1e9), lambda *_: None)
    assert running(journal) == []


# Several tuners.


@pytest.mark.parametrize("database", [False, True], ids=["journal", "sqlite"])
def test_two_tuners_of_one_study(tmp_path, journal, database):
    url = f"sqlite:///{tmp_path}/study.db" if database else journal
    arguments = (*GOOD, "--space=ms=30", "--trials", 12, "--storage", url)
    pair = [start(*arguments) for _ in range(2)]
    results = [end(process) for process in pair]
    assert [code for code, _ in results] == [0, 0], results
    storage = optuna.storages.RDBStorage(url) if database else journal
    assert 12 <= len(outcomes(storage)) <= 13  # each may have begun the last one
    assert running(storage) == []
    assert len({t.user_attrs["owner"] for t in trials(storage)}) == 2
    assert len(entries(tmp_path)) == 1


def test_rivals_that_choose_at_once_differ():
    """In a database a tuner sees others' trials before these have their configs."""
    known = identity()
    strategy = STRATEGIES["exhaustive"](known.space, 0, ())
    study = Study(known, strategy, optuna.storages.InMemoryStorage(), print, {})
    half = study.optuna.ask()
    assert half.relative_params["tile"] == 1  # chosen, not yet written
    fields = known.space.fields.items()
    choose = [lambda n=n, v=v: half.suggest_categorical(n, v) for n, v in fields]
    timer = threading.Timer(0.3, lambda: [write() for write in choose])
    timer.start()
    _, config = study.ask()
    timer.join()
    assert config.tile == 2
    assert half.params["tile"] == 1


# Ends that come from outside.


def children(pid):
    """Processes whose parent it is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_kill_9_at_any_instant(tmp_path, journal):
    rng = random.Random(4)
    arguments = (*GOOD, "--space=ms=30", "--trials", 14, "--storage", journal)
    finished = {}
    for i in range(6):
        process = start(*arguments)
        if i % 3:  # else at any time from its start on
            more = measured(journal) + i % 3
            until(lambda more=more: measured(journal) >= more)
        time.sleep(rng.uniform(0.0, 0.35))
        workers = children(process.pid)
        process.kill()
        until(lambda pids=workers: all(gone(pid) for pid in pids))
        if not journal.exists():
            continue
        for lock in journal.parent.glob("*.lock"):
            with filelock.FileLock(lock, timeout=0):
                pass
        # It makes its journal first: a kill may come before there is a study.
        now = outcomes(journal) if opened(journal).get_all_studies() else {}
        assert finished.items() <= now.items()
        finished = now
        assert not list((tmp_path / "tmp").iterdir())
        assert not list(tmp_path.rglob("*.tmp"))
    assert 0 < len(finished) < 14
    code, errors = end(start(*arguments))
    assert code == 0, errors[-3:]
    after = outcomes(journal)
    assert finished.items() <= after.items()
    assert len(after) == 14
    assert running(journal) == []
    assert len(entries(tmp_path)) == 1


def test_kills_at_random_moments_lose_nothing(tmp_path):
    """Many more than above, two tuners of one study at once among them; JETFIRE_KILLS has more."""
    kills = int(os.environ.get("JETFIRE_KILLS", "8"))
    words = (tmp_path, 5, kills, max(2, kills // 10))
    done = subprocess.run(
        [sys.executable, FAULTS / "storm.py", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hits"] >= kills / 4
    assert found["tuned"] >= 2


@pytest.mark.parametrize(
    ("number", "started"),
    [(signal.SIGINT, Spawned), (signal.SIGTERM, start)],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupted_search_saves_the_best(tmp_path, journal, number, started):
    process = started(*GOOD, "--space=ms=3,60", "--trials", 70, "--storage", journal)
    until(lambda: measured(journal) >= 6)
    os.killpg(process.pid, number)
    code, errors = end(process)
    assert code == 130, errors[-3:]
    assert "saved" in errors[-1]
    assert 6 <= len(outcomes(journal)) < 70
    assert set(outcomes(journal).values()) <= {"ok", "slow"}  # the signal failed no config
    assert running(journal) == []
    assert len(entries(tmp_path)) == 1


def test_an_interrupt_ends_the_command_where_nothing_was_right(tmp_path, journal):
    process = start(
        "--m",
        "64,128",
        "--space=fault=wrong",
        "--space=ms=30",
        "--trials",
        70,
        "--storage",
        tmp_path / "studies",
        FAULTY_DEFAULT="wrong",
    )
    until(lambda: any(measured(file) >= 2 for file in (tmp_path / "studies").rglob("*.journal")))
    os.killpg(process.pid, signal.SIGINT)
    code, errors = end(process)
    assert code == 130, errors[-3:]
    assert not any(line.startswith("jetfire: [2/2]") for line in errors)
    assert entries(tmp_path) == []


def test_an_interrupt_does_not_wait_for_a_hanging_config(journal):
    process = start(
        "--space=fault=none,hang",
        "--space=ms=1",
        "--space=tile=1",
        "--storage",
        journal,
        "--strategy",
        "exhaustive",
        "--trial-timeout",
        "1h",
    )
    until(lambda: measured(journal) >= 1)
    until(lambda: len(trials(journal)) == 2)
    os.killpg(process.pid, signal.SIGINT)
    code, errors = end(process)  # within the hour
    assert code == 130, errors[-3:]
    assert list(outcomes(journal).values()) == ["ok"]


def test_an_interrupt_while_the_first_worker_starts(journal):
    process = Spawned(*GOOD, "--space=ms=1", "--storage", journal)
    until(lambda: len(children(process.pid)) > 1)  # multiprocessing's own and the worker
    os.killpg(process.pid, signal.SIGINT)
    code, errors = end(process)
    assert code == 130, errors[-3:]
    assert not journal.exists() or running(journal) == []


def test_the_first_worker_starts_with_its_signals_blocked(tmp_path):
    """The interpreter of each child gets a SIGINT before it runs any Python."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nkill -INT $$\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing.spawn, operator, sys\n"
        "from jetfire.core.processes import Worker\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.spawn.set_executable(sys.argv[1])\n"
        "    for _ in range(2):\n"
        "        worker = Worker(operator.methodcaller('send', 'started'))\n"
        "        print(worker.answer())\n"
        "        worker.close()\n"
    )
    done = subprocess.run(
        [sys.executable, script, python], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "started\nstarted\n"), done.stderr


def test_a_budget_ends_what_hangs(journal):
    """195 of the configs hang for a second each, all of them for more than three minutes."""
    code, errors = end(
        start(
            "--space=fault=none,hang",
            "--trials",
            10000,
            "--budget",
            "6s",
            "--strategy",
            "random",
            "--storage",
            journal,
        )
    )
    assert code in (0, 6), errors[-3:]  # 6: so busy that none was tried
    tried = outcomes(journal) if journal.exists() else {}
    assert not tried or running(journal) == []
    assert Counter(tried.values())["timeout"] < 100


class Virtual(ReplayRunner):
    """Measures on a clock of its own: what hangs takes a second, another config a tenth of one."""

    def __init__(self, devices, trial_s):
        super().__init__(self)
        runners.append(self)

    def get(self, config, default=None):
        hangs = config.fault == "hang"
        return (
            Measurement("timeout", message="took over 1 s", seconds=1.0)
            if hangs
            else (Measurement("ok", config.ms, seconds=0.1))
        )

    def start(self):
        self.seconds += 2.0

    def begin(self, job):
        self.cancel()


runners = []


@pytest.mark.parametrize("budget", [6, 20, 60])
def test_a_budget_is_kept(capsys, tmp_path, journal, monkeypatch, budget):
    monkeypatch.setattr(command, "DeviceRunner", Virtual)
    code, _, errors = tune(
        capsys,
        "--space=fault=none,hang",
        "--trials",
        10000,
        "--budget",
        f"{budget}s",
        "--strategy",
        "random",
        "--storage",
        journal,
    )
    assert code == 0, errors[-3:]
    assert budget - session_module.FINAL_S - 1 < runners[-1].seconds <= budget
    assert "ok" in outcomes(journal).values()
    assert len(entries(tmp_path)) == 1
    # Too short for a final comparison, it is for none.
    _, _, errors = tune(capsys, "--m", "64,96", "--space=fault=none", "--budget", "3s")
    assert "the budget is spent: 3 of 3 searches left; the same command goes on" in errors[0]
    assert runners[-1].seconds == 0


class Leaving(Virtual):
    """Measures three configs and can no more."""

    def wait(self, timeout):
        if self.seconds > 2.3:
            raise RunnerError("the workers are gone")
        return super().wait(timeout)


def test_trials_of_a_search_that_was_cut_short_are_recorded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DeviceRunner", Leaving)
    file = tmp_path / "recorded.json"
    code, _, errors = tune(capsys, "--space=fault=none", "--record", file)
    assert code == 1, errors[-3:]
    assert "the workers are gone" in errors[-1]
    assert len(json.loads(file.read_text())["trials"]) == 3


class Stub:
    """A worker whose answers, clock and threads are the test's."""

    def __init__(self, threads):
        self.connection, self.theirs = multiprocessing.Pipe()
        self.threads, self.closed = threads, False

    def ask(self, *request):
        pass

    def answer(self):
        return self.connection.recv()

    def waits(self):
        return dict(self.threads)

    def close(self):
        self.closed = True


@pytest.fixture
def stubbed(monkeypatch):
    """A runner of 10 s a config, its only worker a stub, and the clock of both."""
    clock = SimpleNamespace(seconds=1000.0)
    runner = DeviceRunner([CPU], 10.0)
    monkeypatch.setattr(runner, "now", lambda: clock.seconds)
    runner.begin(Job(OP, faulty.KERNEL, PROBLEM, 0, "normal", False, ()))
    runner._measuring[0].worker = worker = Stub({1: 5.0, 2: 0.0})
    return runner, worker, clock


def test_a_config_has_its_limit_from_its_beginning_on(stubbed):
    """Not from its worker's, which takes seconds to start and to make a problem's inputs."""
    runner, worker, clock = stubbed
    runner.submit(0, FaultyConfig())
    clock.seconds += device_module.START_S - 1
    worker.theirs.send(workers_module.BEGUN)
    runner._step(0.0)
    clock.seconds += 9.9
    runner._step(0.0)
    assert runner._done == []
    clock.seconds += 0.1
    runner._step(0.0)
    ((number, found),) = runner._done
    assert (number, found.outcome) == (0, "timeout")
    assert found.message == "took over 10 s to check and time"
    assert found.seconds == pytest.approx(10.0)
    assert worker.closed


def test_a_busy_machine_is_no_configs_fault(stubbed):
    """Seconds in which a worker is ready to run, and others run, do not count."""
    runner, worker, clock = stubbed
    runner.submit(0, FaultyConfig())
    worker.theirs.send(workers_module.BEGUN)
    runner._step(0.0)
    for waited in (30.0, 31.0):
        clock.seconds += waited
        worker.threads[2] += waited - 4.0  # another thread's wait is not added to it
        worker.threads[1] += 1.0
        runner._step(0.0)
        assert runner._done == []
    clock.seconds += 2.1  # of its own: 4, 4 and these
    worker.threads[3] = 0.5  # a new one's
    runner._step(0.0)
    assert [found.outcome for _, found in runner._done] == ["timeout"]


def test_an_answer_that_is_there_is_taken_however_late(stubbed):
    """It may be this process that was kept from running."""
    runner, worker, clock = stubbed
    runner.submit(0, FaultyConfig())
    worker.theirs.send(workers_module.BEGUN)
    runner._step(0.0)
    worker.theirs.send((Measurement("ok", 1.0), True))
    clock.seconds += 100.0
    runner._step(0.0)
    assert [found.outcome for _, found in runner._done] == ["ok"]


def test_an_answer_that_comes_while_nobody_looks_is_taken(stubbed, monkeypatch):
    runner, worker, clock = stubbed
    runner.submit(0, FaultyConfig())
    worker.theirs.send(workers_module.BEGUN)
    runner._step(0.0)
    worker.theirs.send((Measurement("ok", 1.0), True))
    clock.seconds += 100.0
    with monkeypatch.context() as patch:
        patch.setattr(device_module, "mp_connection", SimpleNamespace(wait=lambda *_: []))
        runner._step(0.0)
    runner._step(0.0)
    assert [found.outcome for _, found in runner._done] == ["ok"]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux's")
def test_what_a_worker_waits_is_known():
    """Of two that never rest on one processor each waits while the other runs."""
    processor = min(os.sched_getaffinity(0))
    pair = [Worker(faulty.spin, processor) for _ in range(2)]
    try:
        for worker in pair:
            assert worker.answer() == "spinning"
        before = [sum(worker.waits().values()) for worker in pair]
        until(
            lambda: all(
                sum(w.waits().values()) > b + 0.2 for w, b in zip(pair, before, strict=True)
            )
        )
    finally:
        for worker in pair:
            worker.close()
    assert pair[0].waits() == {}
