"""Result rows and files: what is written can be read back, and nothing is half written."""

import csv
import io
import json
import math

import pytest

from jetfire.bench.results import Results, Row
from jetfire.core.files import write
from jetfire.ops.errors import UsageError


def row(**changes) -> Row:
    fields = {
        "op": "gemm", "kernel": "triton", "role": "kernel", "problem": {"m": 8, "block": 32},
        "config": {"tile_m": 64}, "profile": "default", "data": "normal", "ok": True,
        "rel_err": 0.001, "ms": 1.25, "ms_p20": 1.0, "ms_p80": 1.5, "samples": 20,
        "vs_peer": {"copy": 0.5}, "throttled": ["power cap"],
    }  # fmt: skip
    return Row(**{**fields, **changes})


def test_schema_has_the_documented_fields():
    content = json.loads(Results({"name": "x"}, [row()]).to_json())
    assert content["schema"] == 1
    documented = {
        "op", "kernel", "problem", "config", "profile", "ok", "rel_err", "ms", "ms_p20", "ms_p80",
        "tflops", "gbps", "roofline", "vs_peer", "sm_mhz", "watts", "joules",
    }  # fmt: skip
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
    file.merge([row(ms=2.0), row(config={"tile_m": 128}), row(data="outlier")])
    assert [(r.kernel, r.ms) for r in file.rows][:2] == [("triton", 2.0), ("other", 1.25)]
    assert len(file.rows) == 4


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
