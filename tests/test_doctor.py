"""`jetfire doctor` where a part is missing or broken: one line each, with what to do."""

import json
import subprocess
import sys
from collections import namedtuple
from importlib import metadata

import pytest

from jetfire.cli import execute
from jetfire.core import doctor

REQUIRED = {
    "torch": ["numpy", 'triton==3.6.0; platform_system == "Linux"'],
    "jetfire": ["torch<2.14,>=2.11", "triton>=3.6"],
}
FAKES = {
    "torch": "import types; __version__ = '2.11.0+cu130'\n"
    "version = types.SimpleNamespace(cuda='13.0')\n",
    "triton": "__version__ = '3.6.0'\n",
    "cupy": "__version__ = '14.0'\n",
    "cupy.cuda": "",
    "cupy.cuda.nvrtc": "def createProgram(*_): pass\n"
    "compileProgram = createProgram\n"
    "def getVersion(): return 13, 0\n"
    "def getCUBIN(_): return b'1234'\n",
}


class Libcuda:
    """The driver of a machine with a GPU."""

    def __init__(self, version=13000, error=0, majors=(9,)):
        self.version, self.error, self.majors = version, error, majors

    def cuInit(self, flags):
        return self.error

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.version

    def cuDeviceGetCount(self, pointer):
        pointer._obj.value = len(self.majors)

    def cuDeviceGetName(self, buffer, length, index):
        buffer.value = {7: b"Tesla V100", 8: b"NVIDIA A100"}.get(self.majors[index], b"NVIDIA H200")

    def cuDeviceGetAttribute(self, pointer, attribute, index):
        assert attribute == 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR (cuda.h)
        pointer._obj.value = self.majors[index]


class Machine:
    """A machine that has every part, of which a test breaks one."""

    def __init__(self, monkeypatch, folder):
        self.patch, self.folder = monkeypatch, folder
        for name in ("site", "bin", "cache", "profiles"):
            (folder / name).mkdir()
        for name, source in FAKES.items():
            self.package(name, source)
        for name in ("gcc", "c++"):
            self.program(name, "exit 0")
        self.program("ncu", "echo Version 2025.3")
        monkeypatch.setenv("PYTHONPATH", f"{folder / 'site'}")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}")
        monkeypatch.setenv("JETFIRE_CACHE", str(folder / "cache"))
        monkeypatch.setenv("JETFIRE_PROFILES", str(folder / "profiles"))
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(metadata, "requires", REQUIRED.get)
        self.driver(Libcuda())
        self.counters(restricted=0, capabilities=0)

    def package(self, name, source):
        place = self.folder.joinpath("site", *name.split("."))
        place.mkdir(exist_ok=True)
        (place / "__init__.py").write_text(source)

    def program(self, name, script):
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def lacks(self, *names):
        for name in names:
            (self.folder / "bin" / name).unlink()

    def driver(self, library):
        def load(name):
            assert name == "libcuda.so.1"
            if isinstance(library, OSError):
                raise library
            return library

        self.patch.setattr(doctor.ctypes, "CDLL", load)

    def counters(self, restricted, capabilities):
        for name, text in (
            ("PARAMETERS", f"X: 3\nRmProfilingAdminOnly: {restricted}\n"),
            ("STATUS", f"Name: x\nCapEff:\t{capabilities:016x}\n"),
        ):
            file = self.folder / name
            file.write_text(text)
            self.patch.setattr(doctor, name, file)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def examined(capsys):
    """The exit code, the lines by part, and what is said on stderr."""
    code = execute("doctor", [])
    out, err = capsys.readouterr()
    lines = [line.partition("  ") for line in out.splitlines()]
    return code, {part.strip(): text.strip() for part, _, text in lines}, err


def test_all_is_well(machine, capsys):
    code, lines, err = examined(capsys)
    assert (code, err) == (0, "")
    assert list(lines) == list(doctor.PARTS)
    assert all(text.startswith("ok: ") for text in lines.values())
    assert lines["driver"] == "ok: 1 × NVIDIA H200"
    assert lines["CUDA"] == "ok: torch is built with 13.0, the driver runs up to 13.0"
    assert lines["torch and Triton"] == "ok: torch 2.11.0+cu130, Triton 3.6.0"
    assert lines["NVRTC"] == "ok: NVRTC 13.0 compiles for sm_90a"
    assert lines["ncu"] == "ok: Version 2025.3"


def failing(error):
    return f"raise {error}\n"


NO_TORCH = "No module named 'torch': pip install torch (2.11 or later)"
Usage = namedtuple("Usage", "total used free")
# What is broken, and how the lines of the parts that are not ok begin and end.
BROKEN = {
    "no driver": (
        lambda m: m.driver(OSError("libcuda.so.1: cannot open shared object file")),
        {
            "driver": ("libcuda.so.1: cannot open", "install NVIDIA's driver; a container is"),
            "CUDA": ("libcuda.so.1: cannot open", "install NVIDIA's driver"),
        },
    ),
    "a driver that does not begin": (
        lambda m: m.driver(Libcuda(error=803)),
        {"driver": ("cuInit: error 803", "restart the machine"), "CUDA": ("cuInit", "restart")},
    ),
    "no GPU": (
        lambda m: m.driver(Libcuda(error=100)),
        {
            "driver": ("no GPU", "unset CUDA_VISIBLE_DEVICES"),
            "CUDA": ("no GPU", "unset CUDA_VISIBLE_DEVICES"),
        },
    ),
    "an old GPU": (
        lambda m: m.driver(Libcuda(majors=(9, 7))),
        {"driver": ("Tesla V100: older than sm_80", "use a GPU of sm_80 or newer")},
    ),
    "an old driver": (
        lambda m: m.driver(Libcuda(version=12040)),
        {"CUDA": ("torch is built with CUDA 13.0, the driver runs 12.4", "update the driver")},
    ),
    "torch for CPUs": (
        lambda m: m.package("torch", FAKES["torch"].replace("'13.0'", "None")),
        {"CUDA": ("torch is built for CPUs", "install a build of torch for CUDA")},
    ),
    "no torch": (
        lambda m: m.package("torch", failing("ModuleNotFoundError(\"No module named 'torch'\")")),
        {
            "CUDA": ("ModuleNotFoundError", NO_TORCH),
            "torch and Triton": ("ModuleNotFoundError", NO_TORCH),
        },
    ),
    "a torch that ends the process": (
        lambda m: m.package("torch", "import os; os.abort()"),
        {"CUDA": ("exit code -6", "pip install torch"), "torch and Triton": ("exit", "torch")},
    ),
    "a torch that no test ran with": (
        lambda m: m.package("torch", FAKES["torch"].replace("2.11", "2.14")),
        {
            "torch and Triton": (
                "jetfire asks for torch<2.14,>=2.11, 2.14.0+cu130 is here",
                "pip install --upgrade jetfire",
            )
        },
    ),
    "another Triton": (
        lambda m: m.package("triton", "__version__ = '3.2.0'"),
        {
            "torch and Triton": (
                "torch asks for triton==3.6.0, 3.2.0 is here",
                "pip install --force-reinstall torch",
            )
        },
    ),
    "no Triton": (
        lambda m: m.package("triton", failing("ImportError('broken')")),
        {"torch and Triton": ("ImportError: broken", "pip install --force-reinstall torch")},
    ),
    "no CuPy": (
        lambda m: m.package("cupy", failing("ImportError('no cupy')")),
        {
            "CuPy": ("ImportError: no cupy", "pip install 'jetfire[cuda]'"),
            "NVRTC": ("ImportError: no cupy", "pip install 'jetfire[cuda]'"),
        },
    ),
    "no NVRTC": (
        lambda m: m.package("cupy.cuda.nvrtc", failing("RuntimeError('libnvrtc.so.13: no')")),
        {"NVRTC": ("RuntimeError: libnvrtc.so.13: no", "pip install 'jetfire[cuda]'")},
    ),
    "an old NVRTC": (
        lambda m: m.package(
            "cupy.cuda.nvrtc",
            "def createProgram(*_): pass\n"
            "def compileProgram(*_): raise ValueError('invalid value for --gpu-architecture')\n",
        ),
        {"NVRTC": ("ValueError: invalid value for --gpu-arch", "pip install 'jetfire[cuda]'")},
    ),
    "no C compiler": (
        lambda m: m.lacks("gcc"),
        {"C compiler": ("no gcc or clang, which Triton needs", "or set CC")},
    ),
    "another C compiler, which is not there": (
        lambda m: m.patch.setenv("CC", "nocc"),
        {"C compiler": ("no nocc, which Triton needs", "or set CC")},
    ),
    "no Python.h": (
        lambda m: m.program("gcc", "echo 'a.c:1: fatal error: Python.h: none' >&2; exit 1"),
        {"C compiler": ("a.c:1: fatal error: Python.h: none", "python3-dev")},
    ),
    "no C++ compiler": (
        lambda m: m.lacks("c++"),
        {"C++ compiler": ("no c++, which launches without Python need", "or set CXX")},
    ),
    "no ncu": (
        lambda m: m.lacks("ncu"),
        {"ncu": ("no ncu on the PATH", "install Nsight Compute")},
    ),
    "a broken ncu": (
        lambda m: m.program("ncu", "exit 3"),
        {"ncu": ("exit code 3", "install Nsight Compute")},
    ),
    "counters for administrators": (
        lambda m: m.counters(restricted=1, capabilities=0xFF),
        {"counters": ("the driver lets administrators alone", "--cap-add SYS_ADMIN")},
    ),
    "no file of the driver's parameters": (
        lambda m: m.patch.setattr(doctor, "PARAMETERS", m.folder / "none"),
        {"counters": ("", "No such file or directory: install NVIDIA's driver")},
    ),
    "a cache that is a file": (
        lambda m: (m.folder / "cache").rmdir() or (m.folder / "cache").write_text(""),
        {"cache": ("", "cannot be written: set JETFIRE_CACHE to a folder that can be")},
    ),
    "no folder of profiles": (
        lambda m: m.patch.setenv("JETFIRE_PROFILES", "/proc/none"),
        {"profiles": ("/proc/none cannot be written", "set JETFIRE_PROFILES to a folder")},
    ),
    "a full disk": (
        lambda m: m.patch.setattr(
            doctor.shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 2**30)
        ),
        {"disk": ("1.0 GiB free at ", "free 2 GiB, or set JETFIRE_CACHE")},
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_part_broken(what, machine, capsys):
    break_it, expected = BROKEN[what]
    break_it(machine)
    code, lines, err = examined(capsys)
    assert code == 1
    wrong = {part: text for part, text in lines.items() if not text.startswith("ok: ")}
    assert list(wrong) == list(expected)
    for part, (beginning, end) in expected.items():
        assert wrong[part].startswith(beginning)
        assert end in wrong[part]
    assert err == f"jetfire: doctor: missing or broken: {', '.join(wrong)}\n"


def test_every_part_was_broken():
    assert {part for _, expected in BROKEN.values() for part in expected} == set(doctor.PARTS)


def test_several_gpus(machine, capsys):
    machine.driver(Libcuda(majors=(9, 8, 9)))
    assert examined(capsys)[1]["driver"] == "ok: 2 × NVIDIA H200, 1 × NVIDIA A100"


def test_an_import_that_never_ends(machine, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    machine.package("cupy", "import time; time.sleep(60)")
    _, lines, _ = examined(capsys)
    assert lines["CuPy"] == "took more than 0.5 s: pip install 'jetfire[cuda]'"


def test_a_torch_that_is_broken_is_imported_once(machine, capsys):
    times = machine.folder / "times"
    machine.package("torch", f"open({str(times)!r}, 'a').write('x')\n" + failing("ImportError"))
    assert examined(capsys)[0] == 1
    assert times.read_text() == "x"


def test_a_torch_that_no_installer_put_there(machine, capsys, monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert examined(capsys)[0] == 0


def test_counters_for_administrators_of_whom_this_is_one(machine, capsys):
    machine.counters(restricted=1, capabilities=1 << 21)
    assert examined(capsys)[1]["counters"] == "ok: for administrators, of whom this is one"


def test_the_usual_cache_that_cannot_be_written(machine, capsys, monkeypatch, tmp_path):
    """Which the command line replaces for the run."""
    monkeypatch.delenv("JETFIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    lines = examined(capsys)[1]
    assert lines["cache"].startswith("the usual folder of JETFIRE_CACHE cannot be written: set")


def test_as_json(machine, capsys):
    machine.lacks("ncu")
    assert execute("doctor", ["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = {one["part"]: one for one in document["parts"]}
    said = "doctor: missing or broken: ncu"
    assert document["error"] == {"message": said, "exit_code": 1}
    assert list(found) == list(doctor.PARTS)
    assert [part for part, one in found.items() if not one["ok"]] == ["ncu"]
    assert found["ncu"]["found"] == "no ncu on the PATH"
    assert found["ncu"]["remedy"].startswith("install Nsight Compute")
    assert found["disk"]["remedy"] == ""


WITHOUT = "import sys\nfor name in ('torch', 'triton', 'cupy'): sys.modules[name] = None\n"


def test_it_loads_none_of_what_may_be_broken():
    code = f"{WITHOUT}from jetfire.core import doctor\nprint(len(doctor.PARTS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{len(doctor.PARTS)}\n", "")


def test_this_machine(capsys):
    """Whatever it lacks: every part has a line, and what is not ok a remedy."""
    assert execute("doctor", ["--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)["parts"]
    assert [one["part"] for one in found] == list(doctor.PARTS)
    assert all(bool(one["remedy"]) != one["ok"] for one in found)
    by_part = {one["part"]: one for one in found}
    assert by_part["torch and Triton"]["ok"]
