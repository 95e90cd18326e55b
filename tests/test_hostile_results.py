"""Results and lookups from strangers: a line and exit code 2, whichever command reads them."""

import json
import math
import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given

from jetfire.cli import execute
from jetfire.core.device import Device
from jetfire.measure import peaks
from jetfire.measure.results import MOST, MOST_ROWS, Results, Row
from jetfire.measure.runner import Runner
from jetfire.report.documents import BEGIN, END
from jetfire.tests.hostile import few, mutated, replaced

CPU = Device.parse("cpu")
PEAKS = {"copy_gbps": 4000.0, "int8_tops": 1900.0, "bf16_tflops": 700.0, "how": {"copy_gbps": "x"}}
GEMM = {
    "m": 8192,
    "n": 8192,
    "k": 8192,
    "block": 32,
    "out": "bf16",
    "rounding": "nearest",
    "layout": "q",
    "bias": False,
    "accumulate": False,
}
GELU = {
    "m": 8192,
    "n": 4096,
    "block": 32,
    "mode": "fwd",
    "approximate": "tanh",
    "rounding": "nearest",
    "layout": "q",
}
STEP = {
    "layers": 4,
    "heads": 32,
    "width": 4096,
    "batch": 4,
    "context": 1024,
    "vocabulary": 50304,
    "accumulate": 1,
}
LAYER = {"m": 4608, "n": 5120, "k": 6144, "group": 32, "dtype": "bf16", "mode": "fwd"}
LOOKUP = {
    "op": "gemm",
    "kernel": "triton",
    "problem": GEMM,
    "source": "nearest",
    "distance": 0.5,
    "lookup_ms": 1.1,
    "default_ms": 2.0,
    "tuned_ms": 1.0,
    "trials": 7,
}


def rows() -> list[Row]:
    """One for each table of the report."""
    times = {
        "ms": 1.0,
        "ms_p20": 0.9,
        "ms_p80": 1.1,
        "tflops": 500.0,
        "gbps": 3000.0,
        "ok": True,
        "roofline": 0.5,
        "samples": 9,
        "data": "normal",
        "graph": True,
    }
    curve = {"curve": "promotion", "sqnr_db": 40.0, "row_sqnr_db": 39.0, "schedule_err": 1e-4}
    extra = {
        "peak_gib": 9.0,
        "activation_gib": 2.0,
        "first_step_s": 1.5,
        "peer_activation_gib": {"eager": 5.0},
    }
    return [
        Row("gemm", "triton", "kernel", GEMM, {"warps": 8}, vs_peer={"cublas_bf16": 2.0}, **times),
        Row("gemm", "cublas_bf16", "peer", GEMM, **times),
        Row("gemm", "wgmma", "kernel", GEMM, {"schedule": "exact"}, **times, **curve),
        Row("gemm", "wgmma", "kernel", GEMM, export="wheel", vs_peer={"launch": 1.0}, **times),
        Row("gelu", "triton", "kernel", GELU, vs_peer={"compile": 2.0}, **times),
        Row(
            "hadamard_gemm",
            "staged",
            "kernel",
            LAYER,
            vs_peer={"cublas_fp16": 1.5},
            extra={"stages": {"first": 0.25, "second": 0.75}},
            **times,
        ),
        Row(
            "gpt2_step",
            "int8-block32",
            "kernel",
            STEP,
            vs_peer={"eager": 1.5},
            extra=extra,
            throttled=["power cap"],
            **times,
        ),
    ]


def valid() -> dict:
    record = {"name": CPU.name, "kind": "cuda", "driver": "1", "timer": 4, "peaks": PEAKS}
    return json.loads(Results(record, rows()).to_json())


def valid_lookups() -> dict:
    return {"schema": 1, "device": {"name": CPU.name}, "seed": 0, "rows": [LOOKUP]}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """What runs every command that reads results on such a file: name → exit code."""
    patch = pytest.MonkeyPatch()
    patch.setattr(peaks, "cached", lambda *_: PEAKS)
    patch.setattr(Runner, "measure", lambda *_: [Row("gemm", "int_mm", "kernel", GEMM, ms=1.0)])
    folder = tmp_path_factory.mktemp("hostile")
    good, file, readme = folder / "good.json", folder / "r.json", folder / "README.md"
    good.write_text(json.dumps(valid()))
    readme.write_text(f"{BEGIN}\n{END}\n")

    def run(content: bytes, lookups: bytes | None = None) -> dict[str, int]:
        beside = file.with_name("r-lookups.json")
        beside.write_bytes(json.dumps(valid_lookups()).encode() if lookups is None else lookups)
        words = ["gemm", "--m", "16", "--block", "32", "--device", "cpu", "-o", str(file)]
        found = {}
        for name, command in {
            "before": lambda: execute("compare", [str(file), str(good)]),
            "after": lambda: execute("compare", [str(good), str(file)]),
            "history": lambda: execute("history", [str(file)]),
            "append": lambda: execute("bench", [*words, "--append"]),
            "report": lambda: execute("report", [str(file), "--readme", str(readme), "--check"]),
        }.items():
            file.write_bytes(content)
            found[name] = command()
            if found[name] == 2:
                assert file.read_bytes() == content
        assert set(os.listdir(folder)) == {"good.json", "r.json", "r-lookups.json", "README.md"}
        assert readme.read_text() == f"{BEGIN}\n{END}\n"
        return found

    yield run
    patch.undo()


def changed(*path, to) -> bytes:
    """The file with the value at a path replaced."""
    return json.dumps(replaced(valid(), *path, to=to)).encode()


HOSTILE = {
    "empty": b"",
    "no text": b"\xff\xfe{}",
    "no end": json.dumps(valid()).encode()[:-40],
    "a list": b"[]",
    "nested": b'{"schema":1,"device":' + b"[" * 100_000,
    "large": b" " * (MOST + 1),
    "rows": b'{"schema":1,"device":{},"rows":[' + b",".join([b"{}"] * (MOST_ROWS + 1)) + b"]}",
    "version": changed("schema", to=2),
    "time 0": changed("rows", 0, "ms", to=0),
    "negative": changed("rows", 0, "ms", to=-1.0),
    "nan": changed("rows", 0, "ms", to=math.nan),
    "infinity": changed("rows", 0, "ms", to=math.inf),
    "huge": changed("rows", 0, "ms", to=1e300),
    "percentiles": changed("rows", 0, "ms_p20", to=1.5),
    "text for a time": changed("rows", 0, "ms", to="1.0"),
    "rows' names": changed("rows", 0, "kernel", to="\x1b[2Jtriton"),
    "markup for a name": changed("rows", 0, "kernel", to="[bold]triton[/bold]"),
    "a path for an op": changed("rows", 0, "op", to="../../os"),
    "device's escapes": changed("device", "name", to="GPU\x1b]0;owned\x07"),
    "device's lines": changed("device", "name", to="GPU\nrows: 1"),
    "device's name": changed("device", "name", to=["GPU"]),
    "peak 0": changed("device", "peaks", "int8_tops", to=0),
    "peak": changed("device", "peaks", "int8_tops", to="fast"),
    "stages": changed("rows", 5, "stages", to=[1, 2]),
    "a stage's time": changed("rows", 5, "stages", to={"first": 0}),
    "memory": changed("rows", 6, "peak_gib", to="much"),
    "memory of peers": changed("rows", 6, "peer_activation_gib", to={"eager": "x"}),
    "ratio": changed("rows", 0, "vs_peer", to={"copy": 0}),
    "problem": changed("rows", 0, "problem", to=[8, 8]),
    "a problem's value": changed("rows", 0, "problem", "m", to={"a": 1}),
    "many fields": changed("rows", 0, "problem", to={f"f{i}": 1 for i in range(101)}),
    "long": changed("rows", 0, "data", to="x" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_command_reads_a_hostile_file(name, commands, capsys):
    readers = ("before", "after", "history", "append", "report")
    assert commands(HOSTILE[name]) == dict.fromkeys(readers, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("jetfire: ") and "r.json: " in line for line in lines)
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert captured.out == ""


FOR_THE_REPORT = {
    "op": changed("rows", 0, "op", to="unheard_of"),
    "field": changed("rows", 0, "problem", to={**GEMM, "colour": 3}),
    "no field": changed("rows", 0, "problem", to={"m": 8, "n": 8}),
    "no size": changed("rows", 6, "problem", to={"layers": 4}),
    "part of a row": changed("rows", 0, "problem", "m", to=8.5),
    "size": changed("rows", 0, "problem", "m", to=10**300),
    "text": changed("rows", 0, "problem", "block", to="32"),
}


@pytest.mark.parametrize("name", FOR_THE_REPORT)
def test_the_report_looks_into_problems(name, commands, capsys):
    assert commands(FOR_THE_REPORT[name])["report"] == 2
    assert "r.json: rows." in capsys.readouterr().err.splitlines()[-1]


LOOKUPS = {
    "no end": b'{"schema": 1, "device": {"name": "x"}',
    "time": json.dumps({**valid_lookups(), "rows": [{**LOOKUP, "tuned_ms": 0}]}).encode(),
    "op": json.dumps({**valid_lookups(), "rows": [{**LOOKUP, "op": "\x1b[31m"}]}).encode(),
    "source": json.dumps({**valid_lookups(), "rows": [{**LOOKUP, "source": "far"}]}).encode(),
    "another device": json.dumps({**valid_lookups(), "device": {"name": "GPU"}}).encode(),
    "no device": json.dumps({"schema": 1, "device": None, "rows": []}).encode(),
    "large": b" " * (17 << 20),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_are_read_as_strictly(name, commands, capsys):
    assert commands(json.dumps(valid()).encode(), LOOKUPS[name])["report"] == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "r-lookups.json" in x]
    assert line.isprintable()


@pytest.mark.parametrize("readme", [b"\xff", b"no markers", None])
def test_a_readme_that_cannot_be_filled_is_told(readme, tmp_path, capsys):
    file, page = tmp_path / "r.json", tmp_path / "README.md"
    file.write_text(json.dumps(valid()))
    if readme is not None:
        page.write_bytes(readme)
    assert execute("report", [str(file), "--readme", str(page)]) == 2
    assert capsys.readouterr().err.startswith("jetfire: ")
    assert not file.with_suffix(".md").exists()


def test_the_file_that_they_are_made_of_is_read(commands, capsys):
    assert commands(json.dumps(valid()).encode()) == {
        "before": 0,
        "after": 0,
        "history": 0,
        "append": 0,
        "report": 1,
    }


@few
@given(content=mutated(valid()))
def test_a_mutated_file_is_read_or_refused_in_a_line(content, commands, capsys):
    capsys.readouterr()
    codes = commands(json.dumps(content).encode())
    assert codes["before"] in (0, 2)
    assert codes["after"] in (0, 2)
    assert codes["history"] in (0, 2)
    assert codes["append"] in (0, 2)
    assert codes["report"] in (1, 2)  # 1: what stands there is stale
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("jetfire: ")]
    assert all("internal error" not in line and line.isprintable() for line in errors)


WORST = {
    "nested": ('{"schema":1,"device":{"x":[', "[{}]", "]},"),
    "keys": ('{"schema":1,"device":{', '"k {}":[]', "},"),
}


@pytest.mark.parametrize("name", WORST)
def test_the_costliest_files_take_less_than_5_s_and_a_gibibyte(name, tmp_path):
    begin, unit, end = WORST[name]
    count = (MOST - 1000) // (len(unit) + 6 if "k" in unit else len(unit) + 1)
    entries = ",".join(unit.replace("{}", str(i)) if "k" in unit else unit for i in range(count))
    file = tmp_path / "r.json"
    file.write_text(f'{begin}{entries}{end}"rows":[]}}')

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))  # of this process, whatever else runs

    done = subprocess.run(
        [sys.executable, "-m", "jetfire.cli", "compare", str(file), str(file)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"jetfire: {file}: device")
    assert done.stderr.count("\n") == 1
