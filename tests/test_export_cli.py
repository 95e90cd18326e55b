"""`jetfire export` at the command line: what it refuses, and that it writes all or nothing."""

import dataclasses
import json
import os
import re
import time
from pathlib import Path

import pytest

import jetfire
from jetfire.cli import execute
from jetfire.core import files, profiles, registry
from jetfire.core.device import target_device
from jetfire.core.errors import UsageError, WrongResultError
from jetfire.export import command, cuda, embedded, measure, naming, plan, render, targets
from jetfire.export.library import Library, with_header
from jetfire.export.options import ExportOptions
from jetfire.export.plan import ExportPlan
from jetfire.export.target import ExportTarget, run
from jetfire.measure.results import Row

SHIPPED = Path(__file__).parent.parent / "profiles"
GEMM = ("gemm", "--m", "4096", "--block", "128")
QUANTIZE = ("quantize", "--m", "8192", "--n", "4096")
SIZES = ("--m", "8192", "--n", "1024")


class Fake(ExportTarget):
    """Writes the library's files; builds by whatever it is given."""

    def __init__(self, build=lambda folder: None, products=(), programs=()):
        self.built, self.tested = [], []
        self._build, self._products, self._programs = build, products, programs

    def tools(self, library):
        return self._programs

    def files(self, plan, library, sample):
        return {**library.files, **sample.files(), "README.md": b"read me"}

    def build(self, plan, folder):
        self.built.append(sorted(path.name for path in folder.iterdir()))
        self._build(folder)

    def products(self, folder):
        return self._products

    def selftest(self, plan, folder):
        self.tested.append(folder)

    def call(self, plan, folder):
        raise AssertionError("nothing is timed without a GPU")


@pytest.fixture
def fake(monkeypatch, shipped):
    """Puts a fake target and a library of a header alone in place of the real ones."""

    def install(target):
        monkeypatch.setattr(targets, "get", lambda name: target)
        for module in (cuda, embedded):
            monkeypatch.setattr(module, "library", library)
        return target

    return install


def library(plan):
    return with_header(plan, Library({}, (), (), "90a", False, True, ()))


def export(folder, *words):
    return execute("export", [*words, "-o", str(folder)])


def refused(capsys, code=2):
    """The one line on stderr."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("jetfire: ")
    assert captured.out == ""
    return line.removeprefix("jetfire: ")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((*GEMM, "--arch", "7.5"), 5, "architecture sm_75: expected one of sm_80, sm_86, sm_89"),
        ((*GEMM, "--arch", "hopper"), 2, "--arch hopper: expected an architecture such as 90"),
        (
            ("transpose", "--m", "4096", "--arch", "10.0"),
            2,
            "transpose on sm_100: no kernel has a "
            "profile for m=4096 n=4096 block=32; tune it there: jetfire-tune transpose --m 4096",
        ),
        ((*GEMM, "--target", "ptx"), 2, "--target ptx: expected one of cuda, cubin, torch, wheel"),
        ((*GEMM, "--name", "1st"), 2, "--name 1st: expected a C identifier"),
        ((*GEMM, "--name", "union"), 2, "--name union: C and C++ have it as a word of their own"),
        ((*GEMM, "--name", "lambda"), 2, "--name lambda: Python has it as a word of its own"),
        ((*GEMM, "--name", "queue"), 2, "--name queue: a Python module is called so; give another"),
        ((*GEMM, "--name", "torch"), 2, "--name torch: a Python module is called so"),
        ((*GEMM, "--name", "selftest"), 2, "--name selftest: an export has files called so"),
        (("gemm", "--m", "4096", "--block", "32,64"), 2, "block=32 and block=64: one export has"),
        (
            ("gemm", "--m", "4096", "--mode", "bwd"),
            2,
            "out=bf16 and out=fp32: one export has one out; give --set out=",
        ),
        (("gemm", "quantize", "--m", "4096"), 2, "export takes one op, given gemm, quantize"),
        ((*GEMM, "--kernel", "int_mm"), 2, "gemm/int_mm runs on the CPU: expected a GPU kernel"),
        ((*GEMM, "--kernel", "nope"), 2, "no kernel 'nope': expected one of"),
        (
            (*QUANTIZE, "--target", "cuda"),
            2,
            "--target cuda: quantize/triton is not exported as "
            "CUDA C++: expected one of cubin, torch, wheel, hf",
        ),
        (("hadamard_gemm", "--m", "4096"), 2, "hadamard_gemm: it has nothing to tune: it launches"),
        (("gemm", "--workload", "gpt5"), 2, "no workload 'gpt5' (did you mean gpt2-350m?)"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_line(shipped, tmp_path, capsys, words, code, says):
    assert export(tmp_path / "out", *words) == code
    assert refused(capsys).startswith(says)
    assert list(tmp_path.iterdir()) == []


def test_without_a_profile_the_command_that_makes_one_is_named(tmp_path, capsys):
    assert export(tmp_path / "out", *QUANTIZE) == 2
    assert "no kernel has a profile" in (said := refused(capsys))
    assert said.endswith("tune it there: jetfire-tune quantize --m 8192 --n 4096 --block 32")
    assert export(tmp_path / "out", *QUANTIZE, "--kernel", "triton") == 2
    assert refused(capsys).endswith("--n 4096 --block 32 --kernel triton")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            ("hadamard_quantize_codes", *SIZES, "--block", "64", "--set", "layout=both"),
            r"; tune another: jetfire-tune hadamard_quantize_codes .* --kernel triton",
        ),
        (("bit_split_codes", *SIZES, "--block", "32", "--set", "sums=true"), ""),  # no other sums
    ],
)
def test_a_profile_of_a_kernel_without_a_form_is_told_from_none(
    words, remedy, shipped, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(plan, "hosts", lambda op: {})
    assert export(tmp_path, *words, "--arch", "9.0") == 2
    said = f"{words[0]} on sm_90: rows has a profile for m=8192 .*, but no form as CUDA C"
    assert re.fullmatch(rf"{said}\+\+{remedy}", refused(capsys))


def test_a_folder_is_asked_for(shipped, capsys):
    assert execute("export", list(GEMM)) == 2
    assert refused(capsys) == "export: expected -o DIR"


def test_a_folder_with_content_is_left_alone(fake, tmp_path, capsys):
    target = fake(Fake())
    (tmp_path / "mine").write_text("keep")
    for folder in (tmp_path, tmp_path / "mine"):
        assert export(folder, *GEMM) == 2
        assert refused(capsys) == f"-o {folder}: expected a new or empty folder"
    assert (tmp_path / "mine").read_text() == "keep"
    assert target.built == []


def test_where_nothing_can_be_written_is_said(fake, tmp_path, capsys):
    fake(Fake())
    (tmp_path / "file").write_text("")
    assert export(tmp_path / "file" / "out", *GEMM) == 2
    assert refused(capsys).startswith(
        f"{tmp_path / 'file' / 'out'}: cannot be written: Not a directory"
    )


@pytest.mark.parametrize(
    ("words", "variable", "missing"),
    [((*GEMM, "--target", "cuda"), "NVCC", "nvcc"), ((*QUANTIZE, "--target", "cubin"), "CC", "cc")],
)
def test_without_a_compiler_nothing_is_written(
    shipped, tmp_path, capsys, monkeypatch, words, variable, missing
):
    monkeypatch.setattr(embedded, "library", library)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    for present, absent in (((), "make"), (("make",), missing)):
        for name in present:
            (tmp_path / "bin" / name).write_text("#!/bin/sh")
            (tmp_path / "bin" / name).chmod(0o755)
        assert export(tmp_path / "new" / "out", *words) == 2
        assert refused(capsys).startswith(f"{absent} is not on the PATH: install it, or give --no-")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_without_a_compiler_it_can_be_written_unbuilt(shipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert export(tmp_path / "out", *GEMM, "--no-check") == 0
    captured = capsys.readouterr()
    assert captured.err == "jetfire: gemm/wgmma as cuda: written, not built\n"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"jetfire_gemm.cu", "jetfire_gemm.h", "Makefile", "README.md", "profile.json"} <= names
    assert set(captured.out.splitlines()) >= {
        str(tmp_path / "out" / name) for name in names - {"samples"}
    }


@pytest.mark.filterwarnings("ignore::jetfire.core.errors.JetfireWarning")
def test_the_nearest_size_s_time_is_not_taken_for_its_own(shipped, tmp_path):
    words = ("gemm", "--m", "4352", "--n", "4096", "--k", "4096", "--block", "128", "--no-check")
    assert export(tmp_path / "out", *words) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| 4352×4096×4096 |"))
    assert "| – | – | for 4096×4096×4096, on NVIDIA H200" in row  # tuned last
    assert "{{4352, 4096, 4096}, 0}," in (tmp_path / "out" / "manifest.h").read_text()


def test_a_config_of_two_launches_is_exported_in_one_and_said_to_be(tmp_path, capsys, monkeypatch):
    op, device = registry.get("gemm"), target_device((9, 0))
    config = registry.get_kernel("gemm", "wgmma").Config(2, cluster_m=2, cluster_n=4)
    shipped = profiles.read(SHIPPED / "nvidia-h200" / "gemm.json")
    of_wgmma = next(entry for entry in shipped if entry.kernel == "wgmma")
    problem = op.Problem(4096, 4096, 4096, block=128)
    entry = dataclasses.replace(of_wgmma, problem=problem.as_dict(), config=config.as_dict())
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path / "own"))
    profiles.save(tmp_path / "own", device, op, [entry])
    profiles.forget()
    assert export(tmp_path / "out", *GEMM, "--kernel", "wgmma", "--no-check") == 0
    profiles.forget()
    said = "the tuned config is two launches at once, which no export has: it was exported in one"
    assert capsys.readouterr().err.splitlines()[-1] == f"jetfire: {said} launch, which takes longer"
    (entry,) = json.loads((tmp_path / "out" / "profile.json").read_text())["entries"]
    assert (entry["tuned_config"]["cluster_m"], entry["tuned_config"]["cluster_n"]) == (2, 4)
    assert (entry["config"]["cluster_m"], entry["config"]["cluster_n"]) == (1, 2)
    assert entry["config"]["raster"] == 2 * entry["tuned_config"]["raster"]
    assert entry["ms"] is None
    source = (tmp_path / "out" / "jetfire_gemm.cu").read_text()
    assert re.search(r"CLUSTER_M = 1;.*CLUSTER_N = 2;", source, re.DOTALL)
    assert "That time is of two launches at once; this is one." in re.sub(r"\n// ", " ", source)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "| – | – | one launch in place of two; for 4096×4096×4096, on" in readme
    assert "{{4096, 4096, 4096}, 0}," in (tmp_path / "out" / "manifest.h").read_text()


def test_every_shape_of_a_workload_is_exported(shipped, tmp_path):
    words = ("gemm", "--workload", "gpt2-350m", "--name", "linear", "--no-check")
    assert export(tmp_path / "out", *words) == 0
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    shapes = [(e["problem"]["n"], e["problem"]["k"]) for e in profile["entries"]]
    assert shapes == [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]
    assert "int linear(" in (tmp_path / "out" / "linear.h").read_text()


def test_the_dispatch_is_the_profiles_table(shipped, tmp_path):
    """Each problem's sizes lead to the source with its config's constants; there are no more."""
    assert export(tmp_path / "out", "gemm", "--workload", "gpt2-350m", "--no-check") == 0
    table = (tmp_path / "out" / "jetfire_gemm.cu").read_text()
    rows = re.findall(r"^    \{(\d+), (\d+), (\d+), (\w+)\},$", table, re.MULTILINE)
    launched = {tuple(map(int, sizes)): symbol for *sizes, symbol in rows}
    entries = json.loads((tmp_path / "out" / "profile.json").read_text())["entries"]
    assert len(rows) == len(launched) == len(entries) == 4
    assert len(set(launched.values())) > 1
    for entry in entries:
        symbol = launched[tuple(entry["problem"][dim] for dim in "mnk")]
        source = (tmp_path / "out" / f"{symbol}.cu").read_text()
        constants = dict(re.findall(r"^constexpr int (\w+) = (\d+);", source, re.MULTILINE))
        for name in ("groups", "rows", "tile_n", "stages", "buffers", "cluster_m", "raster"):
            assert int(constants[name.upper()]) == entry["config"][name]


def test_what_it_built_belongs_to_it_and_the_rest_goes(fake, tmp_path, capsys):
    def build(folder):
        (folder / "dist" / "deep").mkdir(parents=True)
        (folder / "dist" / "deep" / "it.whl").write_text("wheel")
        (folder / "one.so").write_text("library")
        (folder / "junk.o").write_text("object")

    fake(Fake(build, products=("dist", "one.so")))
    assert export(tmp_path / "a" / "out", *GEMM) == 0
    found = sorted(p.name for p in (tmp_path / "a" / "out").rglob("*") if p.is_file())
    assert "it.whl" in found
    assert "one.so" in found
    assert "junk.o" not in found
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    assert "built; not run: no GPU of sm_90 here" in capsys.readouterr().err


def _interrupt(folder):
    raise KeyboardInterrupt


def _fail(folder):
    raise WrongResultError("make: exit code 2: no such instruction")


@pytest.mark.parametrize(
    ("build", "code", "says"),
    [
        (_interrupt, 130, "interrupted"),
        (_fail, 3, "make: exit code 2: no such instruction"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_what_was_cut_short_leaves_nothing(fake, tmp_path, capsys, build, code, says, there):
    target = fake(Fake(build))
    folder = tmp_path / "new" / "out"
    if there:
        folder.mkdir(parents=True)
    assert export(folder, *GEMM) == code
    assert refused(capsys) == says
    assert "README.md" in target.built[0]
    assert list(tmp_path.rglob("*")) == ([tmp_path / "new", folder] if there else [])


def test_what_is_cut_short_while_it_takes_its_place_leaves_nothing(
    fake, tmp_path, capsys, monkeypatch
):
    fake(Fake())
    moved, replace = [], os.replace

    def interrupt(source, destination):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(source)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", interrupt)
    assert export(tmp_path, *GEMM) == 130
    assert len(moved) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [False, True])
def test_what_appears_in_its_folder_meanwhile_is_left_alone(fake, tmp_path, capsys, there):
    folder = tmp_path / "out"
    if there:
        folder.mkdir()

    def build(_):
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text("mine")

    fake(Fake(build))
    assert export(folder, *GEMM) == 2
    assert refused(capsys) == f"-o {folder}: expected a new or empty folder"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"README.md": "mine"}


def test_an_export_that_is_cut_short_takes_back_its_own_files_alone(fake, tmp_path, monkeypatch):
    """The very moment in which it takes its place is the last for others to write there."""
    fake(Fake())
    (tmp_path / "out").mkdir()
    moved, replace = [], os.replace

    def interrupt(source, destination):
        if len(moved) == 2:
            destination.mkdir(exist_ok=True)
            (destination / "notes").write_text("mine")
            raise KeyboardInterrupt
        moved.append(destination.name)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", interrupt)
    assert export(tmp_path / "out", *GEMM) == 130
    (kept,) = (tmp_path / "out").iterdir()
    assert kept.name not in moved
    assert (kept / "notes").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_export_left_goes(fake, tmp_path, capsys, there):
    fake(Fake())
    folder = tmp_path / "out"
    place = folder if there else tmp_path
    (place / ".out.x1y2z3a4.part" / "whole").mkdir(parents=True)
    (place / ".out.x1y2z3a4.part" / "whole" / "README.md").write_text("half")
    (place / ".out.lock").write_text("")
    assert export(folder, *GEMM) == 0, capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["README.md", "jetfire_gemm.h", "profile.json", "samples"]
    assert os.listdir(tmp_path) == ["out"]


def test_two_exports_to_one_folder_do_not_mix(fake, tmp_path, capsys):
    def build(folder):
        assert export(tmp_path / "out", *GEMM) == 2
        assert refused(capsys) == f"{tmp_path}/.out.lock: another process holds it"

    fake(Fake(build))
    assert export(tmp_path / "out", *GEMM) == 0
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_is_on_the_disk_before_it_has_its_name(fake, tmp_path, monkeypatch):
    fake(Fake())
    done, replace, sync = [], os.replace, files.sync
    monkeypatch.setattr(files, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda *a: (done.append("rename"), replace(*a)))
    assert export(tmp_path / "out", *GEMM) == 0
    at = done.index("rename")
    assert {"README.md", "profile.json", "samples", "a.bin", "whole"} <= set(done[:at])
    assert done[at + 1 :] == [tmp_path.name]


def test_an_empty_folder_stays_the_same_folder(fake, tmp_path, monkeypatch):
    fake(Fake())
    monkeypatch.chdir(tmp_path)
    before = tmp_path.stat().st_ino
    assert execute("export", [*GEMM, "-o", "."]) == 0
    assert tmp_path.stat().st_ino == before
    assert sorted(os.listdir(".")) == ["README.md", "jetfire_gemm.h", "profile.json", "samples"]


@pytest.mark.parametrize(("ratio", "code"), [(1.004, 0), (0.98, 0), (0.91, 4)])
def test_on_a_gpu_it_is_tested_and_its_speed_told(fake, tmp_path, capsys, monkeypatch, ratio, code):
    target = fake(Fake())

    def row(plan, name, folder):
        return [
            Row(
                "gemm",
                "wgmma",
                "kernel",
                plan.problem.as_dict(),
                ms=0.1,
                export=name,
                vs_peer={"launch": ratio},
            )
        ]

    monkeypatch.setattr(ExportPlan, "runs_here", True)
    monkeypatch.setattr(measure, "measure", row)
    assert export(tmp_path / "out", *GEMM) == code
    assert (tmp_path / "out" / "README.md").is_file()
    assert len(target.tested) == 1
    done, speed, *slow = capsys.readouterr().err.splitlines()
    assert done == "jetfire: gemm/wgmma as cuda: built; self-test passed"
    assert speed.startswith(f"jetfire: 4096×4096×4096: 100 µs, {ratio:.3f}× the speed of the ")
    assert (
        slow
        == [
            "jetfire: 4096×4096×4096 0.910×: expected 0.98 of the speed of the workbench's "
            "launch at least"
        ][: code != 0]
    )


def test_a_program_that_is_cut_short_takes_with_it_what_it_started(tmp_path):
    script, pid, limit = "sleep 3600 & echo $! > pid; sleep 3600", tmp_path / "pid", 0.3
    while not (pid.exists() and pid.read_text()):  # it has to have begun, on a busy machine too
        with pytest.raises(WrongResultError, match=f"took over {limit:g} s"):
            run(["sh", "-c", script], tmp_path, timeout_s=limit)
        limit *= 4
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    end = time.monotonic() + 900
    while stat.exists() and ") Z " not in stat.read_text():  # until whoever adopts it looks
        assert time.monotonic() < end, "it lives"
        time.sleep(0.02)


def test_the_suite_needs_a_gpu(capsys):
    assert execute("bench", ["--suite", "export"]) == 5
    assert refused(capsys).startswith("--suite export: its kernels are for a GPU of sm_90")
    assert execute("bench", ["--suite", "export", "--m", "512"]) == 2
    assert "says itself what is measured" in refused(capsys)


def test_the_suite_lists_every_target_of_the_gemm(capsys):
    assert execute("bench", ["--suite", "export", "--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    problem = "m=8192 n=8192 k=8192 block=128 out=bf16"
    for name in targets.NAMES:
        assert any(
            t.startswith(f"gemm/wgmma {problem}") and t.endswith(f" as {name}") for t in listed
        )


@pytest.mark.parametrize("target", ["cuda", "torch", "wheel", "hf"])
def test_every_source_says_its_licence_and_the_commit_that_wrote_it(
    shipped, tmp_path, monkeypatch, target
):
    monkeypatch.setattr(render, "commit", lambda: "c0ffee")
    assert export(tmp_path / "out", *GEMM, "--no-check", "--target", target) == 0
    for file in (path for path in (tmp_path / "out").rglob("*") if path.is_file()):
        if file.suffix in (".bin", ".json", ".md") or file.name == "LICENSE":
            continue
        sign = "//" if file.suffix in (".c", ".cpp", ".cu", ".h") else "#"
        assert file.read_text().splitlines()[:2] == [
            f"{sign} SPDX-License-Identifier: MIT",
            f"{sign} Written by jetfire {jetfire.__version__}, commit c0ffee.",
        ], file


DEFINED = re.compile(
    r"^(?: {2})?(?:static |inline )*[\w:<>*& ]*?\b(\w+)\([^;]*?\) \{$", re.MULTILINE
)


def test_no_export_is_called_as_what_its_own_files_define():
    folder = Path(naming.__file__).parent / "files"
    sources = [file for file in folder.rglob("*") if file.suffix in (".c", ".h")]
    names = {name for file in sources for name in DEFINED.findall(file.read_text())}
    names -= {"main", "if", "for", "while", "switch"}
    assert {"allocate", "extent_of", "prepare", "sizes_of", "call_function", "usage"} <= names
    for name in (*names, "call", "workspace_bytes", "error_text"):
        with pytest.raises(UsageError, match=f"--name {name}: "):
            naming.check(name)


def test_a_target_is_refused_by_the_function_too(tmp_path):
    with pytest.raises(UsageError, match=r"^--target nope: expected"):
        command.run(ExportOptions(tmp_path / "out", target_device((9, 0)), target="nope"))
    assert not (tmp_path / "out").exists()
