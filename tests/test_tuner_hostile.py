"""Profiles, studies and recordings of strangers: one line or a cleaned display, whatever they hold.

No file outside is written, nothing of them runs, no command hangs or ends in an internal error.
"""

import gzip
import json
import os
import resource
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FAULTS = Path(__file__).parent / "faults"
sys.path.insert(0, str(FAULTS))

import faulty  # noqa: E402

from jetfire import cli  # noqa: E402
from jetfire.core import lookup, profiles, registry  # noqa: E402
from jetfire.core.device import Device  # noqa: E402
from jetfire.core.errors import UsageError  # noqa: E402
from jetfire.core.files import Unwritable  # noqa: E402
from jetfire.measure import provenance  # noqa: E402
from jetfire.tests.hostile import ESC, MARKUP, damaged, errors_kept, few, mutated  # noqa: E402
from jetfire.tuner import command, saved_study, session  # noqa: E402
from jetfire.tuner.recording import Recording, ReplayRunner  # noqa: E402
from jetfire.tuner.trial import Measurement  # noqa: E402

DATA = Path(__file__).parent / "data"
DOCUMENTED = {0, 2, 3, 4, 5, 6}
TUNE = (
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
    "--space=fault=none",
    "--space=ms=1",
)
EIGHT = (*TUNE, "--trials", "8")


class Recorded:
    """What became of any config there is."""

    def get(self, config, default=None):
        return Measurement("ok", 1.0 + config.tile / 100, seconds=0.01)


class Runner(ReplayRunner):
    """Measures nothing and starts no process."""

    def __init__(self, devices, trial_s):
        super().__init__(Recorded())

    def start(self):
        pass

    def begin(self, job):
        self.cancel()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Profiles and studies of a test's own; configs are not measured."""
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv("JETFIRE_STUDIES", str(tmp_path / "studies"))
    monkeypatch.setitem(registry.kernels("transpose"), "faulty", faulty.KERNEL)
    monkeypatch.setattr(command, "DeviceRunner", Runner)
    profiles.forget()
    yield tmp_path
    profiles.forget()


def alarm(*_):
    raise AssertionError("took too long")


def run(capsys, *words, seconds=5):
    """The command in this process: exit code, stdout, lines on stderr.

    It ends in time, with a documented code, and prints nothing that a terminal obeys.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGVTALRM, alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # its own time, however busy the machine
    profiles.forget()
    try:
        code = cli.execute("tune", [*map(str, words)])
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    out, errors = capsys.readouterr()
    assert "Traceback" not in errors, errors
    assert code in DOCUMENTED, (code, errors)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    for line in (*out.splitlines(), *errors.splitlines()):
        assert line.isprintable(), ascii(line)
    return code, out, errors.splitlines()


# Studies.


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The lines of a journal of eight trials."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETFIRE_PROFILES", str(folder / "profiles"))
        patch.setitem(registry.kernels("transpose"), "faulty", faulty.KERNEL)
        patch.setattr(command, "DeviceRunner", Runner)
        assert cli.execute("tune", [*EIGHT, "--storage", str(folder / "s.journal")]) == 0
    profiles.forget()
    return [json.loads(line) for line in (folder / "s.journal").read_text().splitlines()]


def journal(tmp_path, lines):
    file = tmp_path / "kept" / "s.journal"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def edited(lines, operation, change, name="", count=99):
    """Lines of which those of an operation (and of an attribute) are changed."""
    found = []
    for line in lines:
        line = json.loads(json.dumps(line))
        named = not name or name in line.get("user_attr", {})
        if line["op_code"] == operation and named and count > 0:
            count -= 1
            change(line)
        found.append(line)
    return found


def attribute(name, value):
    """A change of an attribute of a trial or a study."""
    return lambda line: line["user_attr"].update({name: value})


CREATE_STUDY, STUDY_ATTRIBUTE, CREATE_TRIAL, PARAMETER, END, ATTRIBUTE = 0, 2, 4, 5, 6, 8
SAYS_WHAT_CANNOT_BE = {
    "a time below 0": ("ms", -1.0),
    "no time at all": ("ms", 0),
    "a time of text": ("ms", "fast"),
    "NaN": ("ms", float("nan")),
    "a time beyond all": ("ms", 10**400),
    "an outcome of another kind": ("outcome", ["ok"]),
    "an outcome that there is not": ("outcome", ESC),
    "seconds without end": ("seconds", float("inf")),
    "an energy of lists": ("joules", [[[]]]),
}


@pytest.mark.parametrize("kind", SAYS_WHAT_CANNOT_BE)
def test_a_trial_that_says_what_cannot_be_is_passed_over(capsys, tmp_path, good, kind):
    name, value = SAYS_WHAT_CANNOT_BE[kind]
    file = journal(tmp_path, edited(good, ATTRIBUTE, attribute(name, value), name, count=3))
    code, out, errors = run(
        capsys, *TUNE, "--storage", file, "--report", tmp_path / "r.html", "--trials", "10"
    )
    assert code == 0, errors
    assert any(
        f"study {file}: passed over 3 trials saying what cannot be, the first 0" in line
        for line in errors
    )
    assert "faulty" in out
    assert "<html" in (tmp_path / "r.html").read_text()


SHOWN = {
    "a message with escapes": ("message", f"{ESC}{MARKUP}</script><b>"),
    "a message of 5 MB": ("message", "x" * 5_000_000),
    "a message that is none": ("message", {"a": 1}),
    "a config of lists": ("config", [1, 2]),
    "a config with markup": ("config", {MARKUP: f"{ESC}</script>"}),
    "a config of a size without end": ("config", {"tile": 10**300}),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_what_only_is_shown_is_shown_cleaned(capsys, tmp_path, good, kind):
    name, value = SHOWN[kind]
    file = journal(tmp_path, edited(good, ATTRIBUTE, attribute(name, value), name, count=4))
    words = ("--storage", file, "--report", tmp_path / "r.html", "--record", tmp_path / "r.json")
    code, _, errors = run(capsys, *TUNE, *words, "--trials", "9")
    assert code == 0, errors
    page = (tmp_path / "r.html").read_text()
    assert "\x1b" not in page
    assert page.count("<script") == page.count("</script>")
    assert run(capsys, "--replay", tmp_path / "r.json")[0] == 0


ANOTHERS = {
    "other fields": (
        PARAMETER,
        lambda line: line.update(
            distribution='{"name": "FloatDistribution", "attributes": '
            '{"low": 0.0, "high": 1.0, "step": null, "log": false}}'
        ),
        "other configs",
    ),
    "two objectives": (CREATE_STUDY, lambda line: line.update(directions=[1, 1]), "objective"),
    "to be large": (CREATE_STUDY, lambda line: line.update(directions=[2]), "objective"),
    "no distribution": (PARAMETER, lambda line: line.update(distribution="{}"), "KeyError"),
    "a distribution of code": (
        PARAMETER,
        lambda line: line.update(
            distribution='{"name": "__import__", "attributes": {"name": "os"}}'
        ),
        "ValueError",
    ),
    "no date": (CREATE_TRIAL, lambda line: line.update(datetime_start="soon"), "ValueError"),
    "no state": (END, lambda line: line.update(state=77), "ValueError"),
    "a list for a study": (STUDY_ATTRIBUTE, lambda line: line.update(study_id=[]), "TypeError"),
    "no operation": (END, lambda line: line.update(op_code=None), "AssertionError"),
    "deep": (ATTRIBUTE, lambda line: line.update(user_attr=1), "TypeError"),
}


@pytest.mark.parametrize("kind", ANOTHERS)
def test_a_study_of_something_else_is_one_line(capsys, tmp_path, good, kind):
    operation, change, says = ANOTHERS[kind]
    file = journal(tmp_path, edited(good, operation, change))
    before = file.read_bytes()
    code, out, errors = run(capsys, *EIGHT, "--storage", file)
    assert (code, out, len(errors)) == (2, "", 1)
    assert f"study {file}" in errors[0]
    assert says in errors[0]
    assert file.read_bytes().startswith(before)


def test_a_trial_that_waits_is_not_handed_out(capsys, tmp_path, good):
    """Optuna would give its own parameters, which are none of the space's."""
    fixed = {"fixed_params": {"fault": "segfault", "ms": 60, "tile": 13}}
    waiting = {
        "op_code": CREATE_TRIAL,
        "worker_id": "x",
        "study_id": 0,
        "datetime_start": None,
        "state": 4,
        "system_attrs": fixed,
    }
    file = journal(tmp_path, [*good, waiting, waiting])
    code, _, errors = run(capsys, *TUNE, "--storage", file, "--trials", "12")
    assert code == 0, errors
    assert len(list((tmp_path / "profiles").rglob("*.json"))) == 1


def square(good):
    """A journal that takes Optuna a time as the square of its length, and little to write."""
    bare = {"op_code": CREATE_TRIAL, "worker_id": "x", "study_id": 0, "datetime_start": None}
    choice = '{"name": "CategoricalDistribution", "attributes": {"choices": ["none"]}}'
    named = {
        "op_code": PARAMETER,
        "worker_id": "x",
        "param_value_internal": 0,
        "param_name": "other",
        "distribution": choice,
    }
    trials = [bare] * 12_000
    return [*good, *trials, *({**named, "trial_id": 12_000 + 7 - i} for i in range(12_000))]


NO_JOURNAL = {
    "a pipe": (lambda file, good: os.mkfifo(file), "no regular file"),
    "a folder": (lambda file, good: file.mkdir(), "Is a directory"),
    "100 MB": (lambda file, good: os.truncate(file.touch() or file, 100 << 20), "more than"),
    "dense": (
        lambda file, good: file.write_bytes(b'{"op_code":' + b"[" * 3_000_001),
        "more than 3000000 values",
    ),
    "a device": (lambda file, good: file.symlink_to("/dev/zero"), "is a link"),
    "a link to itself": (lambda file, good: file.symlink_to(file.name), "is a link"),
    "a link out of its folder": (
        lambda file, good: file.symlink_to("../mine"),
        "is a link: expected a regular file",
    ),
    "a link to nothing": (lambda file, good: file.symlink_to("../new"), "is a link"),
    "slow": (
        lambda file, good: file.write_text(
            "".join(json.dumps(line) + "\n" for line in square(good))
        ),
        "takes too long to read",
    ),
}


@pytest.mark.parametrize("kind", NO_JOURNAL)
def test_what_is_no_journal_is_refused_at_once(capsys, tmp_path, good, kind):
    make, says = NO_JOURNAL[kind]
    (tmp_path / "mine").write_text("my own\n")
    file = tmp_path / "kept" / "s.journal"
    file.parent.mkdir()
    make(file, good)
    code, out, errors = run(capsys, *EIGHT, "--storage", file)
    assert (code, out, len(errors)) == (2, "", 1)
    assert f"cannot use study {file}: " in errors[0]
    assert says in errors[0]
    assert (tmp_path / "mine").read_text() == "my own\n"
    assert sorted(os.listdir(tmp_path)) == ["kept", "mine"]


BROKEN_LINES = {
    "deep": b"[" * 100_000 + b"\n",
    "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"\n",
    "no UTF-8": b'{"op_code": "\xff\xfe"}\n',
    "a number of 5000 digits": b'{"op_code": ' + b"9" * 5000 + b"}\n",
    "a list": b"[1, 2]\n",
}


@pytest.mark.parametrize("kind", BROKEN_LINES)
def test_a_line_that_is_no_operation_ends_a_journal(capsys, tmp_path, good, kind):
    file = journal(tmp_path, good)
    file.write_bytes(file.read_bytes() + BROKEN_LINES[kind] + b"{}\n")
    code, _, errors = run(capsys, *TUNE, "--storage", file, "--trials", "9")
    assert code == 0, errors
    assert f"line {len(good) + 1} is corrupt: goes on from the lines before it" in errors[0]
    (kept,) = file.parent.glob("*.corrupt-*")
    assert BROKEN_LINES[kind] in kept.read_bytes()


def test_a_log_is_written_to_no_other_file(capsys, tmp_path, good, monkeypatch):
    monkeypatch.setattr(Recorded, "get", lambda *_: Measurement("crash", message="$(touch x)"))
    storage = tmp_path / "kept"
    assert run(capsys, *EIGHT, "--storage", storage)[0] == 3
    (log,) = storage.rglob("*.log")
    assert log.read_text().count("$(touch x)") == 8
    (tmp_path / "mine").write_text("my own\n")
    for trials, make in (
        (9, lambda: log.symlink_to(tmp_path / "mine")),
        (10, lambda: os.mkfifo(log)),
    ):
        log.unlink()
        make()
        code, _, errors = run(capsys, *TUNE, "--storage", storage, "--trials", trials)
        assert code == 2
        assert f"cannot write log {log}: " in errors[-1]
    assert (tmp_path / "mine").read_text() == "my own\n"


STORAGES = {
    "sqlite:///{}/no/x.db": "unable to open database file",
    "sqlite:///{}": "unable to open database file",
    "sqlite:///{}/text.db": "file is not a database",
    "sqlite:///{}/pipe.db": "",
    "mysql://u:secret@127.0.0.1:1/x": "",
    "://": "cannot open --storage ://",
    "a://" + "b" * 3000: "cannot open --storage",
    "{}/text.db": "Not a directory",
}


@pytest.mark.parametrize("storage", STORAGES)
def test_a_storage_that_is_none_is_one_line(capsys, tmp_path, storage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.db").write_text("no database\n" * 100)
    os.mkfifo(tmp_path / "pipe.db")
    code, _, errors = run(capsys, *EIGHT, "--storage", storage.format(tmp_path))
    assert (code, len(errors)) == (2, 1)
    assert STORAGES[storage] in errors[0]
    assert "secret" not in errors[0]


def test_a_database_of_a_stranger(capsys, tmp_path):
    """Its tables are read, whatever they hold."""
    url = f"sqlite:///{tmp_path}/s.db"
    assert run(capsys, *TUNE, "--storage", url, "--trials", "3")[0] == 0
    with sqlite3.connect(tmp_path / "s.db") as database:
        database.execute("update trial_user_attributes set value_json = '-1.0' where key = 'ms'")
        database.execute("update trial_values set value = -5 where trial_id = 2")
    code, _, errors = run(capsys, *TUNE, "--storage", url, "--trials", "4")
    assert code == 0, errors
    assert "passed over 3 trials" in errors[0]
    with sqlite3.connect(tmp_path / "s.db") as database:
        database.execute("update trial_user_attributes set value_json = '[' where key = 'ms'")
    code, _, errors = run(capsys, *TUNE, "--storage", url, "--trials", "5")
    assert (code, len(errors)) == (2, 1)
    assert f"cannot use study {url}: " in errors[0]


# Profiles.


def origin():
    return provenance.of(faulty.KERNEL, Device.parse("cpu"))


def entry(m=32, **more):
    problem = registry.get("transpose").Problem(m, 32, block=32)
    fields = {
        "kernel": "faulty",
        "problem": problem.as_dict(),
        "config": {"tile": 2},
        "ms": 1.0,
        "ms_p20": 0.9,
        "ms_p80": 1.1,
        "samples": 20,
        "default_ms": 1.5,
        "joules": None,
        "objective": "time",
        "vs_peer": {"copy": 1.25},
        "trials": 50,
        "strategy": "tpe",
        "provenance": origin(),
    }
    return profiles.Entry(**{**fields, **more})


def profile(tmp_path, change=lambda content: None):
    """A profile of two entries on this CPU, changed."""
    entries = [entry(), entry(64)]
    file = profiles.save(
        tmp_path / "profiles", Device.parse("cpu"), registry.get("transpose"), entries
    )
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


COMMANDS = {
    "show": ("show", "transpose"),
    "show as JSON": ("show", "--json"),
    "look up": (*EIGHT, "--missing", "--dry-run"),
}


def first(**fields):
    return lambda content: content["entries"][0].update(fields)


def everywhere(**fields):
    return lambda content: [made.update(fields) for made in content["provenance"].values()]


NO_PROFILE = {
    "a time of 0": first(ms=0),
    "a time below 0": first(ms_p20=-1e-3),
    "a time beyond all": first(default_ms=1e300),
    "a time below all": first(ms=5e-324),
    "an escape for a GPU": everywhere(gpu=f"GPU{ESC}"),
    "a line too many": everywhere(gpu="GPU\nint x = system(0);"),
    "another direction": everywhere(date="2026\u202e62-11"),
    "an escape for a kernel": first(kernel=ESC),
    "a path for a kernel": first(kernel="../../x"),
    "markup for a strategy": first(strategy=MARKUP),
    "an escape in a config": first(config={"tile": ESC}),
    "a field of markup": first(problem={MARKUP: 1}),
    "deep": first(problem={"m": json.loads("[" * 150 + "]" * 150)}),
    "a million entries": lambda content: content.update(entries=[{}] * 1_000_000),
    "many fields": first(config={f"f{i}": i for i in range(101)}),
}


@pytest.mark.parametrize("kind", NO_PROFILE)
def test_a_profile_that_cannot_be_is_skipped_in_a_line(capsys, tmp_path, kind):
    file = profile(tmp_path, NO_PROFILE[kind])
    for words in COMMANDS.values():
        code, out, errors = run(capsys, *words)
        assert code == 0
        skipped = [line for line in errors if f"profile {file} skipped: " in line]
        assert len(skipped) == 1
        assert len(skipped[0]) < 600
        assert "faulty" not in out or words == COMMANDS["look up"]


PASSED_OVER = {
    "sizes beyond all": first(problem={"m": 10**300, "n": 10**300, "block": 32}),
    "sizes of floats": first(problem={"m": 1e300, "n": 32.5, "block": 32}),
    "sizes of text": first(problem={"m": "٣٢", "n": " 32 ", "block": "32"}),
    "no sizes": first(problem={}),
    "a config beyond all": first(config={"tile": 10**300}),
    "a config of text": first(config={"tile": "9" * 2000}),
    "a config that there is not": first(config={"shell": "rm -rf ."}),
    "a kernel that there is not": first(kernel="nope"),
    "markup for a GPU": everywhere(gpu=MARKUP),
    "quotes": everywhere(gpu="';\"`$(x)${x}\\"),
    "no provenance": everywhere(),
}


@pytest.mark.parametrize("kind", PASSED_OVER)
def test_an_odd_entry_spoils_nothing(capsys, tmp_path, kind):
    profile(tmp_path, PASSED_OVER[kind])
    for words in COMMANDS.values():
        code, out, errors = run(capsys, *words)
        assert code == 0
        assert out or "nothing to tune" in errors[0]
        assert not any("skipped" in line for line in errors)
    op = registry.get("transpose")
    other = op.Problem(64, 32, block=32)
    assert lookup.find(op, faulty.KERNEL, other, Device.parse("cpu")).source == "tuned"
    code, _, errors = run(capsys, *EIGHT)
    assert code == 0, errors


def entries(tmp_path):
    """The profile's entries of 32 rows."""
    (file,) = (tmp_path / "profiles").rglob("transpose.json")
    return [one for one in profiles.read(file) if one.problem["m"] == 32]


def test_a_profile_that_is_gone_is_written_again(capsys, tmp_path):
    words = (*EIGHT, "--storage", tmp_path / "s.journal")
    assert run(capsys, *words)[0] == 0
    (before,) = entries(tmp_path)
    assert "tuned already, 8 trials" in run(capsys, *words)[2][-1]
    next((tmp_path / "profiles").rglob("transpose.json")).unlink()
    code, _, errors = run(capsys, *words)
    assert code == 0, errors
    assert not any("tuned already" in line for line in errors)
    assert entries(tmp_path) == [before]


def test_a_profile_s_gain_is_over_the_default(capsys, tmp_path):
    """Not over the config that was in use, here that of the nearest problem."""
    profiles.save(
        tmp_path / "profiles", Device.parse("cpu"), registry.get("transpose"), [entry(64)]
    )
    assert run(capsys, *EIGHT)[0] == 0
    (found,) = entries(tmp_path)
    problem = registry.get("transpose").Problem(32, 32, block=32)
    default = faulty.KERNEL.default(problem, Device.parse("cpu"))
    assert default.tile != entry().config["tile"]
    assert found.default_ms == Recorded().get(default).ms


def test_where_no_profile_is(capsys, tmp_path, monkeypatch):
    """Pipes, folders, loops, links to themselves, 100 MB, files called anything."""
    good = profile(tmp_path)
    folder = good.parent
    os.mkfifo(folder / "gelu.json")
    (folder / "add.json").mkdir()
    (folder / "adamw.json").symlink_to("adamw.json")
    (folder / "dropout.json").symlink_to("/dev/zero")
    (folder / "quantize.json").touch()
    os.truncate(folder / "quantize.json", 100 << 20)
    (folder / f"{MARKUP.replace('/', '|')}.json").write_text(good.read_text())
    (folder.parent / "loop").symlink_to("loop")
    (folder.parent / "again").symlink_to(folder.parent)
    (folder.parent / "file").write_text("{}")
    code, out, errors = run(capsys, "show")
    assert (code, len(errors)) == (0, 5)
    assert "transpose" in out
    said = "\n".join(errors)
    for reason in ("no regular file", "Is a directory", "symbolic links", "more than 16777216"):
        assert reason in said
    monkeypatch.setenv("JETFIRE_PROFILES", str(good))
    code, _, errors = run(capsys, "show")
    assert code == 0
    code, _, errors = run(capsys, *EIGHT)
    assert (code, len(errors)) == (2, 1)
    assert f"cannot write profile {good}/" in errors[0]


# Mutations of all three.


def nothing_else(tmp_path, *allowed):
    """No file is there but those that the command is to write."""
    assert {path.name for path in tmp_path.iterdir()} <= set(allowed)


@few
@given(st.data())
def test_any_profile(capsys, tmp_path, data):
    file = profile(tmp_path)
    text = file.read_text()
    if data.draw(st.booleans()):
        file.write_text(json.dumps(data.draw(mutated(json.loads(text)))))
    else:
        file.write_bytes(data.draw(damaged(text.encode())))
    for words in COMMANDS.values():
        code, _, errors = run(capsys, *words)
        assert code == 0
        assert sum("skipped" in line for line in errors) <= 1
    file.unlink()
    nothing_else(tmp_path, "profiles")


@few
@given(st.data())
def test_any_recording(capsys, tmp_path, data):
    content = json.loads(gzip.decompress((DATA / "gemm-triton-h200.json.gz").read_bytes()))
    content["trials"] = content["trials"][:12]
    file = tmp_path / "r.json"
    if data.draw(st.booleans()):
        file.write_text(json.dumps(data.draw(mutated(content))))
    else:
        packed = gzip.compress(json.dumps(content).encode(), mtime=0)
        file = tmp_path / "r.json.gz"
        file.write_bytes(data.draw(damaged(packed)))
    code, out, errors = run(capsys, "--replay", file, "--trials", 3, "--strategy", "random")
    assert (code == 0) == (out != "")
    assert len(errors) == (code != 0)
    nothing_else(tmp_path, "r.json", "r.json.gz")


def test_several_failures_end_as_the_first(capsys, tmp_path, monkeypatch):
    first = Unwritable(tmp_path / "x", OSError(28, "No space left"))
    first.details = "a compiler's line"
    errors = iter((first, UsageError("another")))

    def fail(*_):
        raise next(errors)

    monkeypatch.setattr(session.Session, "_tune", fail)
    code, out, errors = run(capsys, *TUNE, "--m", "32,64", "--storage", tmp_path)
    assert (code, out) == (2, "")
    said = f"2 of 2 searches failed, the first: {tmp_path}/x: cannot be written: No space left"
    assert errors[-2:] == [f"jetfire: {said}", "a compiler's line"]


MANY = [[]] * 5000
OF_MANY = {
    "outcomes": {"outcomes": MANY},
    "fields": {"fields": {"tile_m": MANY}},
    "values": {"fields": {f"f{i}": MANY[:1000] for i in range(9)}},
    "rows": {"trials": [1] * 5000},
    "ranks": {"trials": [[[], [], [], [], [], 0, 1, 1, 1, 1, 1]] * 5000},
    "device": {"device": {f"k{i}": [[[[[[]]]]]] for i in range(5000)}},
}


@pytest.mark.parametrize("kind", OF_MANY)
def test_a_recording_of_many_faults_keeps_few(tmp_path, monkeypatch, kind):
    content = json.loads(gzip.decompress((DATA / "gemm-triton-h200.json.gz").read_bytes()))
    (tmp_path / "r.json").write_text(json.dumps({**content, **OF_MANY[kind]}))
    kept = errors_kept(monkeypatch)
    with pytest.raises(UsageError, match=r"recording .*: expected"):
        Recording.load(tmp_path / "r.json")
    assert max(kept) <= 10


def test_a_space_of_many_faults_keeps_few(monkeypatch):
    kept = errors_kept(monkeypatch)
    assert saved_study._valid({"tile": MANY}, saved_study._ATTRIBUTES["space"]) is None
    assert (
        saved_study._valid({f"f{i}": 1 for i in range(5000)}, saved_study._ATTRIBUTES["space"])
        is None
    )
    assert max(kept) <= 10


@few
@given(st.data())
def test_any_journal(capsys, tmp_path, good, data):
    if data.draw(st.booleans()):
        file = journal(tmp_path, data.draw(mutated(good)))
    else:
        file = journal(tmp_path, good)
        file.write_bytes(data.draw(damaged(file.read_bytes())))
    words = (*TUNE, "--storage", file, "--report", tmp_path / "r.html", "--trials", 10)
    code, _, errors = run(capsys, *words)
    assert code in (0, 2), errors
    assert code == 0 or sum("cannot use study" in e or "no journal" in e for e in errors) == 1
    nothing_else(tmp_path, "kept", "r.html", "profiles", "studies")
    for path in (tmp_path / "kept").iterdir():
        path.unlink()
