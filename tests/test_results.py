"""Result rows and files: what is written can be read back, and nothing is half written."""

import csv
import io
import json
import math
import statistics
from pathlib import Path

import pytest

from jetfire.cli import execute
from jetfire.core.errors import UsageError
from jetfire.core.files import write
from jetfire.measure import plan, results, runner
from jetfire.measure.results import MOST, MOST_ROWS, Results, Row
from jetfire.measure.runner import Runner

SHIPPED = Path(__file__).parents[1] / "docs" / "results" / "h200.json"


def row(**changes) -> Row:
    fields = {
        "op": "gemm",
        "kernel": "triton",
        "role": "kernel",
        "problem": {"m": 8, "block": 32},
        "config": {"tile_m": 64},
        "profile": "default",
        "data": "normal",
        "ok": True,
        "rel_err": 0.001,
        "ms": 1.25,
        "ms_p20": 1.0,
        "ms_p80": 1.5,
        "samples": 20,
        "vs_peer": {"copy": 0.5},
        "throttled": ["power cap"],
    }
    return Row(**{**fields, **changes})


def test_schema_has_the_documented_fields():
    content = json.loads(Results({"name": "x"}, [row()]).to_json())
    assert content["schema"] == 1
    documented = {
        "op",
        "kernel",
        "problem",
        "config",
        "profile",
        "ok",
        "rel_err",
        "ms",
        "ms_p20",
        "ms_p80",
        "tflops",
        "gbps",
        "roofline",
        "vs_peer",
        "sm_mhz",
        "watts",
        "joules",
    }
    assert documented <= set(content["rows"][0])


def test_round_trip(tmp_path):
    file = tmp_path / "r.json"
    rows = [row(), row(kernel="eager", role="peer", config=None, extra={"peak_gib": 1.5})]
    write(file, Results({"name": "x"}, rows).to_json())
    loaded = Results.load(file)
    assert loaded.device == {"name": "x"}
    assert loaded.rows == rows
    assert json.loads(file.read_text())["rows"][1]["peak_gib"] == 1.5


def test_six_digits_are_kept(tmp_path):
    (tmp_path / "r.json").write_text(Results({}, [row(ms=1.2345678, ms_p80=2.0)]).to_json())
    (found,) = Results.load(tmp_path / "r.json").rows
    assert found.ms == 1.23457


def test_json_has_no_nan_and_a_row_a_line():
    text = Results({"peaks": {"x": math.nan}}, [row(rel_err=math.inf), row()]).to_json()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][0]["rel_err"] is None
    assert sum(line.startswith('{"op"') for line in text.splitlines()) == 2


def test_merge_replaces_the_same_and_adds_the_rest():
    file = Results({}, [row(ms=1.0), row(kernel="other")])
    others = [row(config={"tile_m": 128}, profile=None), row(data="outlier")]
    file.merge(Results({}, [row(ms=2.0), *others]))
    assert [(r.kernel, r.ms) for r in file.rows][:2] == [("triton", 2.0), ("other", 1.25)]
    assert len(file.rows) == 4


def test_merge_replaces_what_another_profile_gave():
    """A config that the user gave is a measurement of its own; a profile's is the one in use."""
    file = Results({}, [row(ms=1.0, profile="tuned"), row(ms=4.0, profile=None)])
    other = {"tile_m": 128}
    file.merge(Results({}, [row(ms=2.0, profile="nearest", config=other)]))
    file.merge(Results({}, [row(ms=3.0, profile=None, config=other)]))
    assert [r.ms for r in file.rows] == [2.0, 4.0, 3.0]
    configs = [{"schedule": schedule} for schedule in ("exact", "telescoped")]
    file.merge(Results({}, [row(config=config, curve="promotion") for config in configs]))
    assert len(file.rows) == 5


def test_rows_of_several_runs_say_which_they_are_of(tmp_path):
    first = Results({"name": "x", "timer": 4, "date": "2026-01-01"}, [row(), row(kernel="old")])
    today = {"name": "x", "timer": 6, "date": "2026-02-02", "peaks": None}
    file = Results(today)
    file.merge(first)
    file.merge(Results(today, [row(ms=1.4)]))  # in place of the first run's
    write(tmp_path / "r.json", file.to_json())
    third = Results.load(tmp_path / "r.json")
    later = Results({"name": "x", "timer": 6, "date": "2026-03-03"})
    later.merge(third)
    for merged, others in ((third, 1), (later, 2)):
        found = {r.kernel: (r.ms, merged.measured(r)["date"]) for r in merged.rows}
        assert found == {"triton": (1.4, "2026-02-02"), "old": (1.25, "2026-01-01")}
        assert len(json.loads(merged.to_json())["runs"]) == others
    later.merge(Results(later.device, [row(kernel="old")]))
    assert len(json.loads(later.to_json())["runs"]) == 1  # no row is of the first run now
    assert "runs" not in json.loads(first.to_json())


def test_csv_is_well_formed():
    text = Results({}, [row(error='a, "b"'), row(config=None)]).to_csv()
    first, second = csv.DictReader(io.StringIO(text))
    assert first["problem.m"] == "8"
    assert first["error"] == 'a, "b"'
    assert first["throttled"] == "power cap"
    assert second["config.tile_m"] == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON: EOF"),
        ("[]", r"\[\]: expected a JSON object"),
        ('{"schema": 1, "device": {}}', "rows is missing"),
        ('{"schema": 2, "device": {}, "rows": []}', "schema '2': this version reads schema 1"),
        ('{"schema": 1, "device": {}, "rows": [{"kernel": "x"}]}', "op is missing"),
        ('{"schema": 1, "device": {}, "rows": [3]}', "rows.0=3: expected a JSON object"),
        (
            '{"schema": 1, "device": {}, "rows": '
            '[{"op": "x", "kernel": "x", "problem": {}, "run": "a"}]}',
            "rows.0.run='a': it is not in runs",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, text, says):
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        Results.load(file)
    assert str(file) in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Results.load(tmp_path / "none.json")


def test_what_a_kernel_says_can_be_read_back(tmp_path):
    said = "RuntimeError: \x1b[31mred\r\x00 \ud800 \u202e" + "x" * 10**6
    write(tmp_path / "r.json", Results({"name": "x"}, [row(ok=False, error=said)]).to_json())
    (found,) = Results.load(tmp_path / "r.json").rows
    assert found.error.startswith(r"RuntimeError: \x1b[31mred \x00 \ud800 \u202ex")
    assert len(found.error) < 2100


def test_a_file_has_room_for_as_many_rows_as_it_may_hold():
    """15,000 rows of a gemm were 9.2 MB, more than was read."""
    lengths: dict[str, list[int]] = {}
    for one in Results.load(SHIPPED).rows:
        lengths.setdefault(one.op, []).append(len(json.dumps(one.as_dict())) + 2)
    usual = [statistics.mean(some) for some in lengths.values() if len(some) > 100]
    assert max(usual) * MOST_ROWS * 1.1 < MOST
    assert MOST_ROWS >= 15_000


@pytest.mark.parametrize(("name", "most"), [("MOST", 1000), ("MOST_ROWS", 4)])
def test_what_could_not_be_read_is_not_written(name, most, monkeypatch):
    monkeypatch.setattr(results, name, most)
    assert Results({}, [row()]).to_json()
    with pytest.raises(UsageError, match=f"^5 rows in .*at most .*{most}"):
        Results({}, [row()] * 5).to_json()


def test_too_many_rows_are_refused_before_they_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    file = tmp_path / "r.json"
    file.write_text(Results({"name": "x"}, [row(kernel=f"k{i}") for i in range(7)]).to_json())
    before = file.read_bytes()
    words = ["gemm", "--m", "8,16", "--block", "32", "--device", "cpu", "--kernel", "int_mm"]
    monkeypatch.setattr(runner, "MOST_ROWS", 10)
    for more, says in (
        (["--append", "--peer", "eager"], "up to 11 rows, 7 of which are there already: "),
        (["--m", "8,16,32"], "up to 18 rows: "),
    ):
        assert execute("bench", [*words, *more, "-o", str(file)]) == 2
        assert f"jetfire: that is {says}expected at most 10" in capsys.readouterr().err
    assert file.read_bytes() == before
    cases = plan.cases(plan.parse(["gemm"], m=["8,16"], block=["32"]), print)
    options = runner.Options(kernels=["int_mm"], peers=["fp32_matmul"])
    runner.check_rows([(case, options) for case in cases], 6)


def test_a_device_has_all_its_peaks_or_none(tmp_path):
    file = tmp_path / "r.json"
    rates = {"copy_gbps": 1.0, "int8_tops": 2.0, "bf16_tflops": 3.0}
    file.write_text(Results({"peaks": rates}, []).to_json())
    assert Results.load(file).device == {"peaks": rates}
    for name in rates:
        left = {other: rate for other, rate in rates.items() if other != name}
        file.write_text(Results({"peaks": left}, []).to_json())
        with pytest.raises(UsageError, match=f"device.peaks.{name} is missing"):
            Results.load(file)
