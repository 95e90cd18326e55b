"""Exports as whoever gets them has them: built with what their README asks for, loaded, tested."""

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from jetfire.cli import execute
from jetfire.core import profiles, registry
from jetfire.core.device import Device, target_device
from jetfire.core.errors import UsageError, WrongResultError
from jetfire.core.profiles import Entry
from jetfire.export import command, measure, samples, suite, targets
from jetfire.export.library import Library, parameters, with_header
from jetfire.export.plan import ExportPlan, TunedProblem, make
from jetfire.export.target import cuda_home, run
from jetfire.export.targets import c_library
from jetfire.measure import nvml, peaks, provenance, timer
from jetfire.measure.plan import Case
from jetfire.measure.results import Results, Row
from jetfire.report.exports import section

SHIPPED = Path(__file__).parent.parent / "profiles"
GEMM = ("gemm", "--m", "4096", "--block", "128", "--target", "cuda")
QUANTIZE = ("quantize", "--m", "8192", "--n", "4096", "--target", "cubin")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def _has_headers():
    try:
        return cuda_home().is_dir()
    except UsageError:
        return False


needs_headers = pytest.mark.skipif(not _has_headers(), reason="needs CUDA's headers")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module", autouse=True)
def _shipped():
    """Profiles are those that the package ships."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "SHIPPED", SHIPPED)
        profiles.forget()
        yield
    profiles.forget()


def bare(home, *programs):
    """An environment with the system's programs, and those named, alone."""
    folder = home / "bin"
    folder.mkdir(exist_ok=True)
    for name in programs:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(home)}


def write(folder, words):
    """An export that is written and not built, moved to a place that it was not written to."""
    assert execute("export", [*words, "--no-check", "-o", str(folder / "made")]) == 0
    return (folder / "made").rename(folder / "moved to")


CALLS = """
import ctypes, sys
try:
    import jetfire
except ImportError:
    pass
else:
    sys.exit("the package is here")
name, pointers, sizes, small = sys.argv[2], int(sys.argv[3]), eval(sys.argv[4]), eval(sys.argv[5])
library = ctypes.CDLL(sys.argv[1])
function, text = getattr(library, name), getattr(library, name + "_error")
text.restype = ctypes.c_char_p
void = ctypes.c_void_p
for address, size in ((256, [0] * len(sizes)), (256, small), (257, sizes), (256, sizes)):
    code = function(*[void(address)] * pointers, *size, void(0))
    print(code, text(code).decode())
"""


def codes(folder, name, pointers, sizes, other, home):
    """Codes and texts of no size, another size, an odd address, and of a right call."""
    arguments = [folder / f"lib{name}.so", name, str(pointers), repr(sizes), repr(other)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CALLS, *map(str, arguments)],
        env=bare(home),
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split(maxsplit=1) for line in done.stdout.splitlines()]


def read(folder):
    """What is written is as wide as ours, names no path of this machine, and is in the README."""
    sources = (SHIPPED.parent / "kernels_cuda").rglob("*.cu*")
    ours = {line for file in sources for line in file.read_text().splitlines()}
    texts = [
        *folder.glob("*.[ch]"),
        *folder.glob("*.cu"),
        folder / "Makefile",
        folder / "CMakeLists.txt",
    ]
    for file in texts:
        for line in file.read_text().splitlines():
            assert len(line) <= 100 or line in ours, f"{file.name}: {line}"
            assert line == line.rstrip(), f"{file.name}: {line!r}"
    readme = (folder / "README.md").read_text()
    for file in [*texts, folder / "README.md", folder / "profile.json"]:
        text = file.read_text()
        assert str(SHIPPED.parent) not in text
        assert "\n\n\n" not in text, file.name
    for file in folder.iterdir():
        name = f"{file.name}/" if file.is_dir() else file.name
        assert f"`{name}`" in readme or name == "README.md"


# The last call is right, but without a driver; with one its addresses are nobody's.
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@needs_nvcc
@no_gpu
def test_cuda_sources_are_built_by_make_and_loaded(tmp_path):
    folder = write(tmp_path, GEMM)
    read(folder)
    made = ["make", "-s", "-j2", "all", "bin/selftest", "bin/benchmark"]
    subprocess.run(made, cwd=folder, env=bare(tmp_path, "nvcc"), check=True)
    found = codes(folder, "jetfire_gemm", 5, [256, 256, 256], [256, 256, 250], tmp_path)
    assert [code for code, _ in found[:3]] == ["1", "1", "2"]
    assert len({text for _, text in found}) == 3
    assert found[3] in (["39", "cudaErrorInsufficientDriver"], ["104", "cudaErrorNoDevice"])


def has_usage(program, sizes):
    """A benchmark refuses other numbers of sizes, those below 1, and what is none."""
    for words in (["0"] * sizes, ["64"] * (sizes - 1) + ["64k"], ["64"] * (sizes + 1)):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: benchmark [M N")


@needs_nvcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
@pytest.mark.parametrize(("words", "pointers", "sizes"), [(GEMM, 5, 3), (QUANTIZE, 3, 2)])
def test_sources_are_built_by_cmake(tmp_path, words, pointers, sizes):
    folder, name = write(tmp_path, words), f"jetfire_{words[0]}"
    environment = bare(tmp_path, "nvcc", "cmake")
    for step in (["-B", "build", "-DBUILD_SHARED_LIBS=ON"], ["--build", "build", "-j2"]):
        subprocess.run(
            ["cmake", *step], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
        )
    library = ctypes.CDLL(folder / "build" / f"lib{name}.so")
    assert library[name](*[None] * pointers, *[0] * sizes, None) == 1
    for program in ("selftest", "benchmark"):
        assert f"{folder}/samples\0".encode() in (folder / "build" / program).read_bytes()
    has_usage(folder / "build" / "benchmark", sizes)


@needs_cc
@needs_headers
@no_gpu
def test_compiled_code_is_built_by_make_and_loaded(tmp_path):
    folder = write(tmp_path, QUANTIZE)
    read(folder)
    made = ["make", "-s", "-j2", f"CUDA_HOME={cuda_home()}", "all", "bin/selftest"]
    subprocess.run(made, cwd=folder, env=bare(tmp_path), check=True)
    found = codes(folder, "jetfire_quantize", 3, [8192, 4096], [4096, 4096], tmp_path)
    assert [code for code, _ in found[:3]] == ["1", "1", "2"]
    assert len({text for _, text in found}) == 3
    none = ["4", "there is no CUDA driver, or one that is too old"]
    assert found[3] in (none, ["104", "CUDA_ERROR_NO_DEVICE"])


PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(both C)
enable_testing()
if(INSTALLED)
  find_package(one REQUIRED)
  find_package(other REQUIRED)
else()
  add_subdirectory(one)
  add_subdirectory(other)
endif()
file(WRITE ${CMAKE_BINARY_DIR}/both.c "#include <one.h>\\n#include <other.h>\\n"
  "int main(void) { return one(0, 0, 0, 0, 0, 0) + other(0, 0, 0, 0, 0, 0) - 2; }")
add_executable(both ${CMAKE_BINARY_DIR}/both.c)
target_link_libraries(both PRIVATE one::one other::other)
"""


def failing(name):
    """A compiled library that takes no sizes."""
    op = registry.get("dequantize")
    problem = op.Problem.parse({"m": 8192, "n": 4096, "block": 32})
    plan = make([Case(op, problem)], "triton", target_device((9, 0)), name)
    arguments = ", ".join(parameters(plan, workspace=False))
    code = f'#include "{name}.h"\nint {name}({arguments}) {{ return {name.upper()}_BAD_SIZE; }}\n'
    code += f'const char* {name}_error(int code) {{ return code ? "bad" : "good"; }}\n'
    files = {f"{name}.c": code.encode()}
    library = with_header(plan, Library(files, (), tuple(files), "90", False, True, ()))
    return c_library.TARGET.files(plan, library, samples.record(plan))


@needs_nvcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_two_exports_are_parts_of_one_cmake_project_and_installed_beside_each_other(tmp_path):
    for name in ("one", "other"):
        suite.write(tmp_path / name, failing(name))
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)

    def cmake(*words):
        command = ["cmake", *map(str, words)]
        environment = bare(tmp_path, "nvcc", "cmake")
        subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL
        )

    cmake("-B", "build", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}")
    cmake("--build", "build", "-j2")
    cmake("--install", "build")
    listed = subprocess.run(
        ["ctest", "-N"], cwd=tmp_path / "build", capture_output=True, text=True, check=True
    )
    assert re.findall(r": (\w+_selftest)$", listed.stdout, re.MULTILINE) == [
        "one_selftest",
        "other_selftest",
    ]
    cmake("-B", "again", "-DINSTALLED=ON", f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}")
    cmake("--build", "again")
    for folder in ("build", "again"):
        assert subprocess.run([tmp_path / folder / "both"], check=False).returncode == 0


# The self-test's own judgement, on a CPU: CUDA's runtime is a header of malloc and memcpy.

RUNTIME = """
#pragma once
#include <stdlib.h>
#include <string.h>
typedef int cudaError_t;
typedef struct CUstream_st* cudaStream_t;
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
static const char* cudaGetErrorString(cudaError_t error) { return error ? "bad" : "good"; }
static cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = NULL; return 0; }
static cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stream != NULL; }
static cudaError_t cudaMalloc(void** at, size_t n) { *at = malloc(n); return *at == NULL; }
static cudaError_t cudaMemset(void* at, int value, size_t n) { memset(at, value, n); return 0; }
static cudaError_t cudaMemcpy(void* to, const void* from, size_t n, int kind) {
  memcpy(to, from, n);
  return kind < 1;
}
"""
DEQUANTIZE = """
#include <string.h>
#include "jetfire_dequantize.h"
static int calls;
int jetfire_dequantize(const int8_t* q, const float* scale, uint16_t* x, int m, int n,
                       struct CUstream_st* stream) {
  if (m < 1 || n < 1) return FAULT == 4 ? JETFIRE_DEQUANTIZE_OK : JETFIRE_DEQUANTIZE_BAD_SIZE;
  if (FAULT == 5) return JETFIRE_DEQUANTIZE_BAD_DEVICE;
  calls++;
  for (int i = 0; i < m * n; i++) {
    float value = q[i] * scale[i / n / 32 * ((n + 31) / 32) + i % n / 32];
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    if (FAULT == 1 && i == 77) bits ^= 1;
    if (FAULT == 2 && i == m * n - 1) continue;
    if (FAULT == 3 && i == 77 && calls == 2) bits ^= 1;
    x[i] = bits;
  }
  return JETFIRE_DEQUANTIZE_OK;
}
const char* jetfire_dequantize_error(int code) { return code ? "another GPU" : "ok"; }
"""


@pytest.fixture(scope="module")
def dequantize(tmp_path_factory):
    """A folder with a self-test of equal bits and one with a tolerance."""
    op = registry.get("dequantize")
    problem = op.Problem.parse({"m": 8192, "n": 4096, "block": 32})
    plan = make([Case(op, problem)], "triton", target_device((9, 0)), None)
    files = {
        "jetfire_dequantize.c": DEQUANTIZE.encode(),
        "cuda_runtime_api.h": RUNTIME.encode(),
    }
    sources = ("jetfire_dequantize.c",)
    library = with_header(plan, Library(files, (), sources, "90", False, True, ()))
    sample = samples.record(plan)
    folder = tmp_path_factory.mktemp("dequantize")
    for name, tolerance in (("exact", 0.0), ("near", 2.0**-8)):
        changed = dataclasses.replace(sample, tolerance={"x": tolerance})
        suite.write(folder / name, c_library.TARGET.files(plan, library, changed))
    return folder


@pytest.mark.parametrize(
    ("op_name", "tolerance"),
    [("quantize", {"q": 0.0, "scale": 0.0}), ("gelu", {"q": 1e-2, "scale": 1e-3})],
)
def test_a_sample_asks_for_equal_bits_only_of_what_has_them_everywhere(shipped, op_name, tolerance):
    op = registry.get(op_name)
    problem = op.Problem.parse({"m": 8192, "n": 4096, "block": 32})
    sample = samples.record(make([Case(op, problem)], "triton", target_device((9, 0)), None))
    assert {name: sample.tolerance[name] for name in tolerance} == tolerance


def selftest(folder, fault):
    """What it prints and its exit code, of a function with a fault."""
    subprocess.run(
        [
            "cc",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-parameter",
            "-Wno-unused-function",
            "-Wno-sign-compare",
            f"-DFAULT={fault}",
            "-I.",
            "-o",
            "run",
            "selftest.c",
            "jetfire_dequantize.c",
            "-lm",
        ],
        cwd=folder,
        check=True,
    )
    done = subprocess.run([folder / "run"], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_cc
@pytest.mark.parametrize(
    ("kind", "fault", "code", "says"),
    [
        ("exact", 0, 0, "x: 0 of 69888 elements differ\nok\n"),
        ("near", 0, 0, "x: relative error 0.0e+00, at most 3.9e-03\nok\n"),
        ("exact", 1, 1, "x: 1 of 69888 elements differ\nFAILED\n"),
        ("near", 1, 0, "at most 3.9e-03\nok\n"),
        ("exact", 2, 1, "x: 1 of 69888 elements differ\nFAILED\n"),
        ("near", 2, 1, "x: relative error nan, at most 3.9e-03\nFAILED\n"),
        ("near", 3, 1, "x: a second run gave other bits in 1 of 69888 elements\nFAILED\n"),
        ("near", 4, 1, "sizes of 0 are not refused\nFAILED\n"),
        ("near", 5, 1, "jetfire_dequantize: another GPU\n"),
    ],
)
def test_a_selftest_finds_what_is_wrong(dequantize, kind, fault, code, says):
    found, printed = selftest(dequantize / kind, fault)
    assert found == code
    assert printed.replace("-nan", "nan").endswith(says)


# What the suite makes of them.


def row(target, ratio, **changes):
    problem = {"m": 8, "n": 16, "k": 32, "block": 32}
    fields = {"ms": 0.5 / ratio, "vs_peer": {"launch": ratio}, "ok": True, **changes}
    return Row(
        "gemm", "wgmma", "kernel", problem, {"tile": 1}, "tuned", "normal", export=target, **fields
    )


@pytest.mark.parametrize(("second", "taken"), [(2.0, "triton"), (1.0, "wgmma")])
def test_of_kernels_that_were_tuned_the_fastest_in_all_is_taken(
    second, taken, tmp_path, monkeypatch
):
    device, op = target_device((9, 0)), registry.get("gemm")
    problems = [op.Problem(4096, n, 4096, block=128) for n in (4096, 8192)]
    times, entries = {"wgmma": (1.0, second), "triton": (2.0, 0.5)}, []
    for name in times:
        kernel = registry.get_kernel("gemm", name)
        origin = provenance.of(kernel, device)
        for problem, ms in zip(problems, times[name], strict=True):
            config = kernel.default(problem, device).as_dict()
            entries.append(
                Entry(
                    name,
                    problem.as_dict(),
                    config,
                    ms,
                    ms,
                    ms,
                    9,
                    None,
                    None,
                    "time",
                    {},
                    1,
                    "tpe",
                    origin,
                )
            )
    monkeypatch.setenv("JETFIRE_PROFILES", str(tmp_path))
    profiles.forget()
    profiles.save(tmp_path, device, registry.get("gemm"), entries)
    plan = make([Case(op, problem) for problem in problems], None, target_device((9, 0)), None)
    profiles.forget()
    assert plan.kernel.name == taken
    assert [one.entry.ms for one in plan.tuned] == list(times[taken])


@pytest.mark.parametrize(("forms", "taken"), [({}, "triton"), ({"tiles": None}, "tiles")])
def test_a_faster_kernel_that_has_no_form_is_left_out(forms, taken, monkeypatch):
    op = registry.get("gelu")
    monkeypatch.setattr("jetfire.export.plan.hosts", lambda op: forms)
    plan = make([Case(op, op.Problem(8192, 4096))], None, target_device((9, 0)), None)
    assert plan.kernel.name == taken


def test_a_target_is_part_of_what_a_row_measures(tmp_path):
    results = Results({"name": "x"})
    results.merge(Results({}, [row("cuda", 1.0), row("torch", 1.0), row("cuda", 0.5)]))
    plain = dataclasses.replace(row("cuda", 1.0), export=None)
    results.merge(Results({}, [plain]))
    assert [r.export for r in results.rows] == ["cuda", "torch", None]
    assert results.rows[0].vs_peer == {"launch": 0.5}
    assert "export" not in plain.as_dict()
    (tmp_path / "r.json").write_text(results.to_json())
    assert Results.load(tmp_path / "r.json").rows == results.rows
    assert results.rows[1].label == "wgmma as torch"


def test_the_report_has_a_column_for_each_target():
    failed = row("hf", 1.0, ms=None, vs_peer=None, ok=False, error="no GPU")
    text = section([row("cuda", 1.0), row("torch", 0.987), failed]).markdown()
    table = text.splitlines()[4:]
    assert table[0] == "|  | launch | cuda | torch | hf |"
    assert table[2] == "| gemm wgmma 8×16×32 block=32 | 500 µs | 1.000× | 0.987× | failed |"
    assert section([]).tables[0].rows == []


class Shown:
    """A target whose function is the CPU kernel's launch, or something else."""

    def __init__(self, launch):
        self.launch = launch

    def call(self, plan, folder):
        return lambda problem, inputs, outputs: self.launch(plan, problem, inputs, outputs)


def _right(plan, problem, inputs, outputs):
    own = plan.op.outputs(problem, inputs)
    plan.kernel.launch(problem, plan.configs[0], inputs, own)
    return own


def _half(plan, problem, inputs, outputs):
    plan.kernel.launch(problem, plan.configs[0], inputs, outputs)
    outputs["c"][: problem.m // 2] = 0
    return outputs


@pytest.fixture
def on_the_cpu(monkeypatch):
    """A plan of the CPU's GEMM, and where measuring finds a target and the CPU."""
    here = Device.parse("cpu")
    monkeypatch.setattr(measure.Device, "parse", lambda *_: here)
    op, kernel = registry.get("gemm"), registry.get_kernel("gemm", "int_mm")
    problem = op.Problem(64, 96, 128, block=32)
    entry = profiles.read(SHIPPED / "nvidia-h200" / "gemm.json")[0]
    plan = ExportPlan("it", op, kernel, here, (TunedProblem(problem, kernel.Config(), entry),))

    def install(launch):
        monkeypatch.setattr(targets, "get", lambda name: Shown(launch))
        return plan

    return install


def test_an_export_is_checked_and_timed_beside_the_launch(on_the_cpu, monkeypatch):
    def time_calls(variants, *_, **__):
        for calls in variants.values():
            calls[0]()
        return {"launch": timer.Timing.of([1.5]), "torch": timer.Timing.of([1.25])}

    monkeypatch.setattr(measure.timer, "time_calls", time_calls)
    (found,) = measure._rows(on_the_cpu(_right), "torch", Path(), None)
    assert (found.op, found.kernel, found.export) == ("gemm", "int_mm", "torch")
    assert (found.ok, found.profile, found.roofline) == (True, "nearest", None)
    assert (found.ms, found.vs_peer) == (1.25, {"launch": 1.2})


def test_an_export_that_is_wrong_is_not_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(measure.timer, "time_calls", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match=r"gemm m=64 .* as torch: c: "):
        measure._rows(on_the_cpu(_half), "torch", Path(), None)


class Ends:
    """Ends the process that it is sent to."""

    def __reduce__(self):
        return os._exit, (7,)


def test_an_export_that_ends_its_process_or_takes_too_long_is_wrong(on_the_cpu, monkeypatch):
    plan = on_the_cpu(_right)
    with pytest.raises(WrongResultError, match=r"^gemm/int_mm as torch: worker ended by exit .* 7"):
        measure.measure(plan, "torch", Path(), {"x": Ends()})
    monkeypatch.setattr(measure, "TIMEOUT_S", 0.1)
    with pytest.raises(WrongResultError, match=r"^gemm/int_mm as torch: took over 0\.1 s$"):
        measure.measure(plan, "torch", Path())


@pytest.mark.parametrize("error", [ImportError, RuntimeError, torch.AcceleratorError])
def test_whatever_an_export_raises_is_a_wrong_result_in_a_line(on_the_cpu, error):
    def fault(*_):
        raise error("CUDA error: an illegal memory access\nFor debugging consider …")

    plan = on_the_cpu(fault)
    found = measure._answer(plan, "torch", Path(), None)
    assert type(found) is WrongResultError
    assert str(found) == (
        f"gemm/int_mm as torch: {error.__name__}: CUDA error: an illegal memory "
        "access For debugging consider …"
    )


def test_an_export_without_a_plan_has_a_row_too():
    problem = registry.get("quantize").Problem(64, 64)
    export = suite.Export("quantize", "nope", problem, "cubin")
    done = Future()
    done.set_exception(OSError("no space"))
    (found,) = suite.rows(export, done, Path(), None)
    assert (found.kernel, found.ok, found.error) == ("nope", False, "OSError: no space")


def test_an_interrupt_ends_what_is_prepared_and_starts_nothing(tmp_path, monkeypatch):
    def prepare(export, folder):
        try:
            run(["sh", "-c", "echo $$ > $$.pid; exec sleep 3600"], tmp_path)
        finally:
            run(["sh", "-c", "touch late; sleep 3600"], tmp_path)

    def interrupt():
        with suite.prepared(suite.exports()[:2]):
            while not any(file.read_text() for file in tmp_path.glob("*.pid")):
                time.sleep(0.02)
            raise KeyboardInterrupt

    monkeypatch.setattr(suite, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        interrupt()  # within the hour
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.stem), 0)
    assert not (tmp_path / "late").exists()
    assert run(["echo", "again"], tmp_path) == "again\n"


def test_the_suite_saves_what_went_well_and_what_did_not(tmp_path, monkeypatch, capsys):
    hopper = dataclasses.replace(Device.parse("cpu"), kind="cuda", capability=(9, 0), name="H")
    monkeypatch.setattr(suite.Device, "parse", lambda *_: hopper)
    monkeypatch.setattr(provenance, "device_record", lambda *_: {"name": "H"})
    monkeypatch.setattr(nvml.Nvml, "open", lambda *_: None)
    monkeypatch.setattr(peaks, "cached", lambda *_: {})
    problem = registry.get("quantize").Problem(8192, 4096, block=32)
    exports = [suite.Export("quantize", "triton", problem, t) for t in ("cubin", "torch", "wheel")]
    monkeypatch.setattr(suite, "exports", lambda: exports)
    finished = []

    def prepare(export, folder):
        if export.target == "torch":
            raise WrongResultError("it does not build")
        if export.target == "wheel":
            raise RuntimeError("a fault")
        finished.append(export)
        return export.plan()

    def measured(plan, target, folder, peaks):
        assert len(finished) == 1
        (tuned,) = plan.tuned
        made = measure.row_of(plan, tuned, target)
        return [dataclasses.replace(made, ok=True, ms=0.025, vs_peer={"launch": 1.01})]

    monkeypatch.setattr(suite, "prepare", prepare)
    monkeypatch.setattr(measure, "measure", measured)
    file = tmp_path / "r.json"
    assert execute("bench", ["--suite", "export", "-o", str(file)]) == 3
    saved = {r.export: r for r in Results.load(file).rows}
    assert saved["cubin"].vs_peer == {"launch": 1.01}
    assert (saved["torch"].ok, saved["torch"].error) == (False, "it does not build")
    assert (saved["wheel"].ok, saved["wheel"].error) == (False, "RuntimeError: a fault")
    shown = capsys.readouterr().out
    assert "triton as cubin" in shown
    assert "1.01× launch" in shown


@pytest.fixture(scope="module")
def exports():
    """All of the suite's, built and tested, several at once."""
    with suite.prepared(suite.exports()) as found:
        for done, _ in found.values():
            done.exception()
        yield found


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != suite.SM90.capability,
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("export", suite.exports(), ids=str)
def test_an_export_passes_its_selftest(export, exports):
    (found,) = suite.rows(export, *exports[export], None)
    assert found.error == ""


@pytest.mark.gpu
@pytest.mark.quiet
@on_hopper
@pytest.mark.parametrize("export", suite.exports(), ids=str)
def test_an_export_is_as_fast(export, exports):
    (found,) = suite.rows(export, *exports[export], None)
    assert found.vs_peer[measure.LAUNCH] >= command.LEAST_SPEED
