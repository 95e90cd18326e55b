"""The peaks that the package holds: those of docs/results/, in a checkout and in a wheel."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jetfire.bench import records
from jetfire.core.device import Device
from jetfire.core.errors import UsageError
from jetfire.gpt2.training import utilisation
from jetfire.measure.results import Results

ROOT = Path(__file__).parent.parent
H200 = Device("cuda", name="NVIDIA H200")


def test_they_are_those_of_the_committed_results():
    assert records.PEAKS.read_text() == records.peaks_text(records.RESULTS), "run `make report`"
    measured = Results.load(ROOT / "docs" / "results" / "h200.json").device["peaks"]
    assert records.peaks()["NVIDIA H200"].peaks == measured


def test_utilisation_is_of_them_and_needs_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "RESULTS", tmp_path / "none")
    measured = json.loads((ROOT / "docs/results/h200.json").read_text())["device"]["peaks"]
    expected = utilisation.Peak(measured["bf16_tflops"], "measured, h200.json")
    assert utilisation.peak(H200) == expected
    assert utilisation.peak(Device("cuda", name="NVIDIA B200")).source == "datasheet"
    assert utilisation.peak(Device("cpu", name="a CPU")) is None


def test_a_wheel_holds_them(tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "jetfire"
    left_out = shutil.ignore_patterns(".*", "docs", "tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("jetfire/measure/peaks.json") == records.PEAKS.read_bytes()
        assert archive.read("jetfire/measure/rows.json") == records.ROWS.read_bytes()
        assert "jetfire/models/sources.py" in archive.namelist()
        assert "jetfire/core/replay/replay.cpp" in archive.namelist()
        assert not any("/docs/" in name for name in archive.namelist())


def test_of_one_device_the_shortest_name_counts_and_no_other_record(tmp_path):
    def save(name, device, rate):
        rates = {"copy_gbps": 3.0, "int8_tops": 4.0, "bf16_tflops": rate}
        peaks = {"peaks": rates} if rate else {}
        (tmp_path / name).write_text(Results({"name": device, **peaks}, []).to_json())

    with pytest.raises(UsageError, match="expected results with peaks"):
        records.peaks_text(tmp_path)
    save("h200-again.json", "H200", 2.0)
    save("h200.json", "H200", 1.0)
    save("a.json", "A100", None)
    (tmp_path / "h200-lookups.json").write_text("no results")
    (tmp_path / "study-x.json").write_text("no results")
    rates = {"copy_gbps": 3.0, "int8_tops": 4.0, "bf16_tflops": 1.0}
    assert json.loads(records.peaks_text(tmp_path))["devices"] == [
        {"name": "H200", "source": "h200.json", "peaks": rates}
    ]


def test_the_command_writes_what_would_change(tmp_path, monkeypatch, capsys):
    files = {"PEAKS": records.peaks_text, "ROWS": records.rows_text}
    for name in files:
        monkeypatch.setattr(records, name, tmp_path / f"{name}.json")
    assert records.main() == 0
    for name, text_of in files.items():
        assert (tmp_path / f"{name}.json").read_text() == text_of(records.RESULTS)
    assert capsys.readouterr().out.count("written") == 2
    assert records.main() == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(records, "RESULTS", tmp_path / "none")
    assert records.main() == 2
    assert capsys.readouterr().err.startswith("jetfire: ")
