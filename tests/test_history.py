"""`jetfire history`: the commit that slowed a kernel is found, and no noise is taken for one."""

import csv
import io
import json
import math
import random
import re
import subprocess
from pathlib import Path

import pytest

from jetfire.bench import history
from jetfire.bench.history import KernelTimes, MeasuredRun, Point, changes
from jetfire.cli import execute
from jetfire.core import checkout
from jetfire.core.device import Device
from jetfire.measure.provenance import device_record
from jetfire.measure.results import Results, Row

NAMES = ("plain", "other", "third")


def row(ms, name="plain", peer=None, spread=0.01, **fields) -> Row:
    times = {"ms": ms, "ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread), "samples": 20}
    beside = None if peer is None else {"copy": peer / ms}
    known = {"role": "kernel", "problem": {"m": 8, "n": 8}, "ok": True, "vs_peer": beside}
    return Row("gelu", name, **known | times | fields)


def save(file, rows, name="GPU", **device):
    file.write_text(Results({"name": name, **device}, list(rows)).to_json())


def series(levels, *, noise=0.01, seed=0, machine=None, peers=None, spread=0.01) -> KernelTimes:
    """Runs of one kernel: its levels, what the machine does to both, and the peer's own levels."""
    rng, points = random.Random(seed), []
    for i, level in enumerate(levels):
        speed = (machine or [1.0] * len(levels))[i]
        ms = level * speed * math.exp(rng.gauss(0.0, noise))
        peer = None if peers is None else peers[i] * speed * math.exp(rng.gauss(0.0, noise / 3))
        points.append(
            Point(MeasuredRun(Path(f"{i}.json"), Results({})), row(ms, peer=peer, spread=spread))
        )
    return KernelTimes("GPU", points)


def found(*args, **options):
    """Where a series changed, and how."""
    return [(change.at, change.verdict) for change in changes([series(*args, **options)])]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository and its commits, from the first to the last."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*words):
        who = ["-c", "user.name=A", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (folder / "kernel.py").write_text("KERNELS = ()\n")
    git("add", "kernel.py")
    commits = []
    for i in range(12):
        git("commit", "-q", "--allow-empty", "-m", f"{i}")
        commits.append(git("rev-parse", "HEAD"))
    return folder, commits


@pytest.fixture
def results(repository, tmp_path, monkeypatch):
    """A folder of results, a file for each commit: at the eighth `plain` becomes 10% slower.

    The clocks of the machines that measured them are wrong, one run was disturbed, and one lacks a
    kernel. Dates say the reverse of what the commits say.
    """
    folder, commits = repository
    monkeypatch.chdir(folder)
    rng = random.Random(7)
    for i, commit in enumerate(commits):
        rows = []
        for name in NAMES:
            ms = 1.1 if name == "plain" and i >= 8 else 1.0
            ms *= math.exp(rng.gauss(0.0, 0.01)) * (1.4 if i == 4 else 1.0)
            rows.append(row(ms, name))
        if i == 6:
            rows.pop()
        time = f"2026-01-{20 - i:02}T00:00:00+00:00"
        save(tmp_path / f"{rng.random()}.json", rows, commit=commit, time=time)
    return tmp_path, commits


def run(capsys, *words):
    code = execute(None, ["history", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_planted_commit_is_found_and_named(results, capsys):
    folder, commits = results
    code, out, err = run(capsys, folder, "--format", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [found[name] for name in ("runs", "pairs", "slower", "unjudged")] == [12, 3, 1, 0]
    (change,) = found["changes"]
    assert (change["kernel"], change["verdict"]) == ("plain", "slower")
    files = [json.loads(Path(change[name]).read_text()) for name in ("file", "after_file")]
    assert [one["device"]["commit"] for one in files] == [commits[8], commits[7]]
    assert (change["commit"], change["after_commit"]) == (commits[8], commits[7])
    assert change["rise"] == pytest.approx(1.1, abs=0.02)
    assert change["noise"] < 0.02
    _, out, _ = run(capsys, folder, "--format", "csv")
    (line,) = csv.DictReader(io.StringIO(out))
    assert (line["kernel"], line["verdict"], line["commit"]) == ("plain", "slower", commits[8])


def test_the_flag_alone_makes_it_an_error(results, capsys):
    folder, commits = results
    code, out, err = run(capsys, folder, "--fail-on-regression", "5%")
    assert code == 4
    assert "12 runs, 3 pairs of kernel and problem: 1 slower than before" in out
    assert commits[8][:9] in out
    assert re.fullmatch(
        r"jetfire: 1 slower by more than 5%: gelu plain m=8 n=8 takes 1\.\d\d× as long since "
        f"{commits[8][:9]}, after {commits[7][:9]}\n",
        err,
    )
    assert run(capsys, folder)[0] == 0
    assert run(capsys, folder, "--fail-on-regression", "20%")[0] == 0


def test_files_may_be_given_one_by_one(results, capsys):
    folder, _ = results
    files = sorted(folder.glob("*.json"))
    code, out, _ = run(capsys, *files, "--format", "md", "--fail-on-regression", "5%")
    assert code == 4
    assert "| GPU | gelu plain m=8 n=8 |" in out
    assert run(capsys, folder, *files, "--format", "md")[1] == out


def test_commits_that_are_not_here_are_ordered_by_time(results, capsys):
    """Whose order is the reverse: what was slower since is faster since."""
    folder, commits = results
    save(folder / "x.json", [row(1.0)], commit="0" * 40, time="2027-01-01T00:00:00+00:00")
    code, out, err = run(capsys, folder, "--format", "json")
    assert code == 0
    assert err.startswith("jetfire: not every run's commit is in this folder's repository")
    (change,) = json.loads(out)["changes"]
    assert (change["verdict"], change["commit"]) == ("faster", commits[7])


def test_a_damaged_file_is_said_and_the_rest_is_judged(results, capsys):
    folder, _ = results
    (folder / "broken.json").write_text('{"schema": 1, "rows": [')
    code, out, err = run(capsys, folder)
    assert code == 2
    assert err.startswith("jetfire: 1 of 13 files cannot be read: ")
    assert "broken.json: no JSON" in err
    assert err.count("\n") == 1
    assert "1 slower than before" in out
    code, _, err = run(capsys, folder, "--fail-on-regression", "5%")
    assert code == 4
    assert [line.partition(":")[2][:10] for line in err.splitlines()] == [
        " 1 of 13 f",
        " 1 slower ",
    ]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("runs", [4, 7, 30])
def test_noise_is_not_accused(runs, seed):
    noisy = [series([1.0] * runs, noise=0.04, seed=100 * seed + i) for i in range(5)]
    assert changes(noisy) == []


def test_a_single_run_is_not_accused_wherever_it_is():
    for at in range(9):
        levels = [1.0] * 9
        levels[at] = 1.5
        assert found(levels) == []
    assert found([1.0] * 7 + [1.5] * 2) == [(7, "slower")]
    assert found([1.0] * 2 + [1.5] * 7) == [(2, "slower")]


def test_what_happens_to_the_peer_too_is_the_machine():
    slow = [1.0] * 6 + [1.2] * 6
    assert found([1.0] * 12, machine=slow, peers=[2.0] * 12) == []
    assert found([1.0] * 12, machine=slow) == [(6, "slower")]  # nothing says otherwise
    assert found(slow, machine=[1.0, 1.2] * 6, peers=[2.0] * 12) == [(6, "slower")]


def test_a_peer_that_became_faster_is_no_slowdown():
    assert found([1.0] * 12, peers=[2.0] * 6 + [1.0] * 6) == []


def test_samples_that_scatter_more_than_the_step_prove_nothing():
    levels = [1.0] * 4 + [1.1] * 4
    assert found(levels, noise=0.001) == [(4, "slower")]
    assert found(levels, noise=0.001, spread=0.2) == []


def test_levels_that_come_and_go():
    steps = [1.0] * 8 + [1.1] * 8 + [1.3] * 8
    assert found(steps) == [(16, "slower"), (8, "slower")]  # the largest first
    mended = [1.0] * 8 + [1.5] * 10
    assert found(mended + [1.0] * 6) == [(8, "mended since"), (18, "faster")]
    assert found(mended + [1.1] * 6) == [(8, "mended since"), (18, "faster")]
    assert found(mended + [1.4] * 6) == [(8, "slower"), (18, "faster")]


def test_what_differs_is_apart_and_wrong_rows_do_not_count():
    results = Results(
        {"name": "GPU"},
        [
            row(1.0, config={"tile": 1}),
            row(0.5, config={"tile": 2}),
            row(1.0, data="heavy"),
            row(1.0, ok=False),
            row(1.0, name="copy", role="peer"),
        ],
    )
    runs = [
        MeasuredRun(Path("a"), results),
        MeasuredRun(Path("b"), Results({"name": "another"}, [row(1.0)])),
        MeasuredRun(Path("c"), Results({"name": "GPU", "timer": 9}, [row(3.0)])),
    ]
    every = history.series_of(runs)
    assert [(one.device, one.row.data, [p.ms for p in one.points]) for one in every] == [
        ("GPU", None, [0.5]),
        ("GPU", "heavy", [1.0]),
        ("another", None, [1.0]),
        ("GPU", None, [3.0]),
    ]


def test_two_hundred_runs_of_a_hundred_rows(tmp_path, capsys):
    rng = random.Random(3)
    for i in range(200):
        rows = []
        for j in range(100):
            ms = (1.1 if j == 42 and i >= 150 else 1.0) * math.exp(rng.gauss(0.0, 0.02))
            rows.append(row(ms, problem={"m": j}))
        save(tmp_path / f"{i:03}.json", rows, time=f"2026-01-01T00:{i // 60:02}:{i % 60:02}+00:00")
    code, out, err = run(capsys, tmp_path, "--format", "json")
    assert (code, err) == (0, "")
    (change,) = json.loads(out)["changes"]
    assert change["problem"] == {"m": 42}
    assert abs(int(Path(change["file"]).stem) - 150) <= 1


EVIL = "<script>alert(1)</script><b>x</b>"


def test_a_page_shows_what_changed_first_and_nothing_runs_in_it(results, tmp_path, capsys):
    folder, commits = results
    for file in folder.glob("*.json"):
        content = json.loads(file.read_text())
        content["device"]["name"] = EVIL
        file.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    assert run(capsys, folder, "--report", page)[0] == 0
    text = page.read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)" in text
    titles = re.findall(r"<summary><h2>gelu · (\w+)</h2>", text)
    assert titles == ["plain", "other", "third"]
    assert f"slower since {commits[8][:9]}: 1." in text
    figures = re.findall(r'<script type="application/json" id="[^"]*">(.*?)</script>', text)
    first = json.loads(figures[0])
    assert len(figures) == 3
    assert len(first["data"][0]["x"]) == 12
    assert len(first["data"]) == 2  # times, and a level
    assert text.count('<tr class="changed">') == 1
    same = tmp_path / "same.html"
    run(capsys, folder, "--report", same)
    assert same.read_bytes() == page.read_bytes()


def test_a_commit_is_digits_alone(tmp_path, capsys):
    save(tmp_path / "a.json", [row(1.0)], commit="--output=x" + "0" * 40)
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "device" in err


def test_nothing_to_judge(tmp_path, capsys):
    code, _, err = run(capsys, tmp_path)
    assert (code, err) == (
        2,
        f"jetfire: {tmp_path}: expected results, files named .json or .json.gz\n",
    )
    save(tmp_path / "a.json", [row(1.0, role="peer", ok=None)])
    assert run(capsys, tmp_path)[2] == "jetfire: no file has the time of a kernel\n"
    save(tmp_path / "a.json", [row(1.0)])
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert "1 with fewer than 4 runs, which cannot be judged" in out


def test_results_say_what_commit_they_are_of(repository, monkeypatch):
    folder, commits = repository
    assert checkout.measured([folder / "kernel.py"]) == commits[-1]
    monkeypatch.setattr(checkout, "_ROOT", folder / "nothing")
    monkeypatch.chdir(folder)
    record = device_record(Device.parse("cpu"), None, {})
    assert record["commit"] == commits[-1]
    assert record["time"].startswith(record["date"])
    before = (folder / "kernel.py").read_text()
    (folder / "kernel.py").write_text("KERNELS = ()  # changed\n")
    assert checkout.measured([]) == f"{commits[-1]}+"
    (folder / "kernel.py").write_text(before)
    monkeypatch.chdir(folder.parent)
    assert checkout.measured([]) is None
    assert checkout.order(commits) is None
