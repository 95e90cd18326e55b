"""The times that the package holds: those of docs/results/."""

import json

import pytest

from jetfire.bench import records
from jetfire.core.errors import UsageError
from jetfire.measure.results import Results, Row

SHAPE = {"m": 64, "n": 64, "block": 32}
H200 = {"name": "NVIDIA H200", "capability": [9, 0]}


def test_they_are_those_of_the_committed_results():
    assert records.ROWS.read_text() == records.rows_text(records.RESULTS), "run `make report`"
    found = records.rows()["NVIDIA H200"]
    assert (found.capability, found.source) == ((9, 0), "h200.json")
    assert len(found.by_problem()) == len(found.rows)
    measured = Results.load(records.RESULTS / "h200.json").rows
    least = min(
        row.ms
        for row in measured
        if (row.op, row.role, row.export) == ("gelu", "kernel", None)
        and row.problem == next(r.problem for r in found.rows if r.op == "gelu")
    )
    first = next(row for row in found.rows if row.op == "gelu")
    assert first.ms == pytest.approx(least, rel=1e-3)


def test_of_a_problem_the_fastest_right_kernel_counts(tmp_path):
    def row(kernel, ms, **more):
        return Row("gelu", kernel, "kernel", SHAPE, **{"ok": True, "ms": ms, **more})

    rows = [
        row("triton", 2.0, vs_peer={"compile": 2.0, "copy": 1.0}),
        row("tiles", 1.0, vs_peer={"compile": 4.0, "copy": 2.0}),
        row("wrong", 0.5, ok=False),
        row("shipped", 0.4, export="cuda"),
        row("heavy", 0.3, data="outlier"),
        Row("gelu", "compile", "peer", SHAPE, ms=4.0),
        Row("model_step", "int8", "kernel", {"model": "hf:x", "run": "eager"}, ok=True, ms=9.0),
    ]
    (tmp_path / "h200.json").write_text(Results(H200, rows).to_json())
    (device,) = json.loads(records.rows_text(tmp_path))["devices"]
    assert device["rows"] == [
        {"op": "gelu", "problem": SHAPE, "kernel": "tiles", "ms": 1.0, "peers": {"compile": 4.0}}
    ]


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected results with rows"):
        records.rows_text(tmp_path)
    (tmp_path / "h200.json").write_text(Results(H200, []).to_json())
    with pytest.raises(UsageError, match="expected results with rows"):
        records.rows_text(tmp_path)
