"""Exit codes as README.md has them, where they were others: no device, no time, no home."""

import os
from pathlib import Path

import pytest

from jetfire.bench import catalogue
from jetfire.cli import execute
from jetfire.core.errors import UsageError
from jetfire.export import naming
from jetfire.measure import peaks, plan
from jetfire.measure.runner import Runner

SMALL = ["gemm", "--m", "33", "--block", "32", "--device", "cpu", "--rounds", "2"]
PEAKS = {"copy_gbps": 10.0, "int8_tops": 0.1, "bf16_tflops": 0.1, "how": {}}


def said(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench gemm --m 64 --kernel wgmma --device cpu", "gemm/wgmma does not run on"),
        ("bench gemm --m 64 --kernel mma,wgmma --device cpu", "gemm/wgmma does not run on"),
        ("bench int4-gemm --m 64 --kernel mma --device cpu", "int4_gemm/mma does not run on"),
        ("bench gemm --m 64 --device cuda:99", "device 'cuda:99': this machine has"),
        ("tune gemm --m 64 --kernel wgmma --device cpu", "no kernel to tune for these problems on"),
        ("train tune tiny --device cpu", "nothing to tune for training on"),
        ("export gemm -o new --arch 7.5", "architecture sm_75: expected one of sm_80"),
        (
            "audit gelu --kernel tiles --arch 80 --m 512 --n 512",
            "no kernel with machine code takes these problems on these architectures: tiles: needs",
        ),
        (
            "export gelu --kernel tiles --arch 80 --m 512 --n 512 --no-check -o new",
            "gelu/tiles on sm_80: needs sm_90",
        ),
        ("audit gemm --arch 75", "architecture sm_75: expected one of sm_80"),
    ],
)
def test_what_wants_another_device_exits_5(words, says, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "measure", lambda *_: pytest.fail("measured all the same"))
    assert execute(None, words.split()) == 5
    (line,) = said(capsys)
    assert line.startswith(f"jetfire: {says}")


def test_what_no_device_takes_exits_2(capsys):
    words = "tune gemm --m 64 --kernel int_mm --device cpu"
    assert execute(None, words.split()) == 2
    assert "int_mm: has nothing to tune" in said(capsys)[0]


LARGE = [
    ("--m 99999999999999999999", "--m 99999999999999999999: expected a size of at most 1099511"),
    ("--m 4611686018427387904", "expected a size of at most 1099511627776"),
    ("--m 1099511627777", "expected a size of at most 1099511627776"),
    ("--m 2147483647", "gemm 2147483647×2147483647: expected at most 1099511627776 elements"),
    ("--m 64 --n 1e9", "--n 1e9: expected a size"),
    ("--m 1:1000000:1", "--m 1:1000000:1: that is 1000000 sizes: expected at most 10000"),
    ("--m 1:9223372036854775807:1", "expected a size of at most 1099511627776"),
    ("--m 1:6000:1,1:6000:1", "that is 12000 sizes: expected at most 10000"),
    ("--m 1:5000:1 --block 32,64,128", "that is 15000 problems: expected at most 10000"),
    ("--m 1:200:1 --n 1:200:1 --block 32,64,128", "that is 120000 problems: expected at most"),
]


@pytest.mark.parametrize("verb", ["bench", "tune", "audit", "tune show", "export -o new"])
@pytest.mark.parametrize(("sizes", "says"), LARGE)
def test_sizes_and_numbers_of_problems_have_bounds(
    verb, sizes, says, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert execute(None, [*verb.split(), "gemm", *sizes.split()]) == 2
    (line,) = said(capsys)
    assert says in line


@pytest.mark.parametrize(
    "words",
    [
        "adamw --m 1048576",
        "sample_rows --m 1099511627776",
        "hadamard_gemm --m 1048576 --n 4096",
        "gather_rows --m 64 --n 64 --set rows=99999999999999999999",
    ],
)
def test_what_fits_no_memory_is_no_internal_error(words, capsys):
    assert execute("bench", [*words.split(), "--device", "cpu"]) == 2


def test_sizes_given_several_times_are_a_list(capsys):
    words = [*SMALL, "--m", "40", "--n", "8", "--n", "16", "--dry-run", "--peer", "none"]
    assert execute("bench", words) == 0
    captured = capsys.readouterr()
    shapes = ["m=33 n=8", "m=33 n=16", "m=40 n=8", "m=40 n=16"]
    assert [shape for shape in shapes if shape in captured.out] == shapes
    assert captured.err == ""


def test_another_option_given_again_is_told_of(capsys):
    assert execute("bench", [*SMALL, "--rounds", "3", "--dry-run", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "jetfire: --rounds is given 2 times: the last one counts\n"
    assert "3 samples per row" in captured.out


@pytest.fixture
def homeless(monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "JETFIRE_CACHE", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")


def test_a_home_that_cannot_be_written_costs_caches_alone(homeless, monkeypatch, capsys):
    """Triton and CuPy failed without theirs, and their kernels counted as wrong."""
    monkeypatch.setattr(peaks, "measure", lambda *_: PEAKS)
    assert execute("bench", [*SMALL, "--peer", "none"]) == 0
    seen = []

    def listing(found):
        seen.append(os.environ["TRITON_HOME"])
        assert {os.environ["CUPY_CACHE_DIR"], os.environ["JETFIRE_CACHE"]} == set(seen)
        assert Path(seen[0]).is_dir()
        return ""

    monkeypatch.setattr(catalogue, "listing", listing)
    assert execute(None, ["list"]) == 0
    assert not Path(seen[0]).exists()
    assert "TRITON_HOME" not in os.environ


def test_what_is_to_be_kept_in_a_home_that_cannot_be_written_is_refused(
    homeless, monkeypatch, capsys
):
    monkeypatch.setattr(peaks, "measure", lambda *_: PEAKS)
    assert execute(None, ["train", "prepare", "python"]) == 2
    assert ": /proc/nobody/.cache/jetfire/data" in said(capsys)[-1]
    monkeypatch.delenv("JETFIRE_STUDIES")
    words = ["transpose", "--kernel", "triton", "--m", "64", "--block", "32", "--device", "cpu"]
    assert execute("tune", [*words, "--trials", "1"]) == 2
    assert "/proc/nobody" in said(capsys)[-1]


@pytest.mark.parametrize(("option", "name"), [("-o", "r.json"), ("--plot", "p.svg")])
def test_a_table_is_shown_though_a_file_cannot_be_written(
    option, name, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jetfire.core.files.os.fsync", full)
    monkeypatch.setattr("jetfire.report.plot.plot", full)
    file = tmp_path / name
    assert execute("bench", [*SMALL, "--peer", "none", option, str(file)]) == 2
    captured = capsys.readouterr()
    assert "int_mm" in captured.out
    last = captured.err.splitlines()[-1]
    assert last == f"jetfire: {file}: cannot be written: No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_chart_on_a_full_disk_is_one_line_and_the_table_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peaks, "cached", lambda *_: PEAKS)
    for option, name in (("--plot", "p.png"), ("-o", "r.json")):
        file = tmp_path / name
        file.symlink_to("/dev/full")
        assert execute("bench", [*SMALL, "--peer", "none", option, str(file)]) == 2
        captured = capsys.readouterr()
        assert "int_mm" in captured.out
        last = captured.err.splitlines()[-1]
        assert last == f"jetfire: {file}: cannot be written: No space left on device"


def test_the_bound_counts_the_problems_of_all_ops(monkeypatch):
    request = plan.parse(["gemm", "quantize", "sample_rows"], m=["64,128"])
    count = len(plan.cases(request, lambda _: None))
    assert count == 2 * (3 + 3 + 1)
    monkeypatch.setattr(plan, "MOST_PROBLEMS", count)
    assert len(plan.cases(request, lambda _: None)) == count
    monkeypatch.setattr(plan, "MOST_PROBLEMS", count - 1)
    with pytest.raises(UsageError, match=f"^that is {count} problems: expected at most "):
        plan.cases(request, lambda _: None)


TAKEN = {
    "printf": "the C library, or Python, has a function called so",
    "write": "the C library",
    "malloc": "the C library",
    "cosf": "the C library",
    "PyList_New": "the C library, or Python",
    "size_t": "C reserves what ends in _t for types",
    "int4": "CUDA has a type of that name",
    "ulonglong2": "CUDA has a type of that name",
    "cudaMalloc": "CUDA's names begin so",
    "cuLaunchKernel": "CUDA's names begin so",
    "PyThing": "Python's names in C begin so",
    "dim3": "a header of",
    "threadIdx": "a header of",
    "NULL": "a header of",
    "INT_MAX": "C has such a macro",
    "ENOENT": "C has macros that begin so",
    "SIGTERM": "C has macros that begin so",
    "int": "C and C++ have it as a word of their own",
    "lambda": "Python has it as a word of its own",
    "json": "a Python module is called so",
    "tests": "an export has files called so",
    "_gemm": "expected a C identifier",
    "größe": "expected a C identifier",
    "a b": "expected a C identifier",
    "a" * 64: "expected a C identifier of at most 63 characters",
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_name_that_something_else_has_is_refused_before_torch_loads(name, capsys, monkeypatch):
    monkeypatch.setattr("jetfire.export.options.check_new", lambda *_: pytest.fail("too late"))
    assert execute("export", ["gemm", "--m", "4096", "-o", "new", "--name", name]) == 2
    (line,) = said(capsys)
    assert line.startswith(f"jetfire: --name {name}: {TAKEN[name]}")


@pytest.mark.parametrize("name", ["gemm", "my_gemm", "linear", "Int8Gemm", "int8mm"])
def test_names_of_one_s_own_are_taken(name):
    naming.check(name)
