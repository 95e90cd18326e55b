"""What this machine has of all that kernels, training and tuning need, and what to do about it.

Nothing of torch, Triton and CuPy is loaded here: another process imports each, so that one which is
broken, or ends the process, is a line like any other.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jetfire.core import environment, files, profiles

TIMEOUT_S = 120.0  # of an import; torch's took 20 s on two busy cores
LEAST_FREE = 2 * 2**30  # bytes for compiled kernels and profiles
CUDA_PACKAGES = "pip install 'jetfire[cuda]'"
PERMIT = (  # how to let this user read counters
    "run as root (a container with --cap-add SYS_ADMIN), or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)
PARAMETERS, STATUS = Path("/proc/driver/nvidia/params"), Path("/proc/self/status")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h)
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR (cuda.h)
_SYS_ADMIN = 1 << 21  # CAP_SYS_ADMIN (capabilities(7))


class BrokenError(Exception):
    """What is wrong with a part, in a line, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class Finding:
    """What is known of a part.

    Attributes:
        found: what there is; where it is not ok, what is wrong.
        remedy: what to do; empty where it is ok.
    """

    part: str
    ok: bool
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return a finding of every part."""
    _ran.cache_clear()
    found = []
    for part, look in PARTS.items():
        try:
            found.append(Finding(part, True, look()))
        except BrokenError as error:
            found.append(Finding(part, False, str(error), error.remedy))
    return found


def _output(command: Sequence[str], remedy: str) -> str:
    """Return what a program prints.

    Raises:
        BrokenError: it fails; with the last line that it says.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BrokenError(f"took more than {TIMEOUT_S:g} s", remedy) from None
    except OSError as error:
        raise BrokenError(f"{command[0]}: {error.strerror}", remedy) from None
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        raise BrokenError(said[-1], remedy)
    return done.stdout.strip()


@cache
def _ran(code: str) -> tuple[str, str]:
    """Return what Python code prints in a process of its own, or what is wrong."""
    try:
        return _output([sys.executable, "-c", code], ""), ""
    except BrokenError as error:
        return "", str(error)


def _printed(code: str, remedy: str) -> str:
    """Return what Python code prints; it is run once, as an import that hangs takes minutes."""
    text, wrong = _ran(code)
    if wrong:
        raise BrokenError(wrong, remedy)
    return text


def _driver() -> tuple[ctypes.CDLL, tuple[int, int]]:
    """Return the driver's library once it has begun, and the newest CUDA that it runs."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        remedy = "install NVIDIA's driver; a container is started with --gpus all"
        raise BrokenError(str(error), remedy) from None
    code = library.cuInit(0)
    if code == _NO_DEVICE:
        raise BrokenError("no GPU", "unset CUDA_VISIBLE_DEVICES, or make a GPU visible by it")
    if code:
        remedy = "nvidia-smi says more; after an update of the driver restart the machine"
        raise BrokenError(f"cuInit: error {code}", remedy)
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return library, (version.value // 1000, version.value % 1000 // 10)


def _gpus() -> str:
    library, _ = _driver()
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    found = [_gpu(library, index) for index in range(count.value)]
    if old := [name for name, major in found if major < 8]:
        raise BrokenError(f"{', '.join(old)}: older than sm_80", "use a GPU of sm_80 or newer")
    return ", ".join(f"{n} × {name}" for (name, _), n in Counter(found).items())


def _gpu(library: ctypes.CDLL, index: int) -> tuple[str, int]:
    """Return a GPU's name and the first number of its compute capability."""
    name, major = ctypes.create_string_buffer(100), ctypes.c_int()
    library.cuDeviceGetName(name, 100, index)
    library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, index)
    return name.value.decode(errors="replace"), major.value


def _torch() -> tuple[str, str]:
    """Return the versions of torch and of the CUDA that it was built with, or ``None``."""
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    version, cuda = _printed(code, "pip install torch (2.11 or later)").split()[-2:]
    return version, cuda


def _cuda() -> str:
    _, (major, minor) = _driver()
    _, built = _torch()
    if built == "None":
        raise BrokenError("torch is built for CPUs", "install a build of torch for CUDA")
    if int(built.partition(".")[0]) > major:
        raise BrokenError(
            f"torch is built with CUDA {built}, the driver runs {major}.{minor}",
            "update the driver, or install torch for an older CUDA",
        )
    return f"torch is built with {built}, the driver runs up to {major}.{minor}"


def _pair() -> str:
    """Return the versions of torch and of Triton, which Jetfire and torch ask for."""
    version, _ = _torch()
    again = "pip install --force-reinstall torch, which brings its own Triton"
    triton = _printed("import triton; print(triton.__version__)", again).split()[-1]
    upgrade = "pip install --upgrade jetfire, or torch as it asks"
    for of, package, there, remedy in (
        ("jetfire", "torch", version, upgrade),
        ("torch", "triton", triton, again),
        ("jetfire", "triton", triton, upgrade),
    ):
        wanted = _wanted(of, package)
        if not wanted.contains(there, prereleases=True):
            raise BrokenError(f"{of} asks for {package}{wanted}, {there} is here", remedy)
    return f"torch {version}, Triton {triton}"


def _wanted(of: str, package: str) -> SpecifierSet:
    """Return which versions of a package another asks for; any where no installer put it there."""
    found = SpecifierSet()
    with suppress(metadata.PackageNotFoundError):
        for requirement in map(Requirement, metadata.requires(of) or ()):
            if requirement.name == package:
                found &= requirement.specifier
    return found


def _cupy() -> str:
    return f"CuPy {_printed('import cupy; print(cupy.__version__)', CUDA_PACKAGES).split()[-1]}"


_COMPILES = """
from cupy.cuda import nvrtc
program = nvrtc.createProgram("__global__ void f() {}", "f.cu", (), ())
nvrtc.compileProgram(program, ("-arch=sm_90a",))
print(*nvrtc.getVersion(), len(nvrtc.getCUBIN(program)))
"""


def _nvrtc() -> str:
    major, minor, _ = _printed(_COMPILES, CUDA_PACKAGES).split()[-3:]
    return f"NVRTC {major}.{minor} compiles for sm_90a"


def _compiles(variable: str, names: Sequence[str], source: str, needed: str) -> str:
    """Return the first of some compilers, or the variable's, which compiles a source."""
    chosen = [os.environ[variable]] if os.environ.get(variable) else names
    found = next(filter(None, map(shutil.which, chosen)), None)
    remedy = f"install {names[0]} and Python's headers (gcc, g++, python3-dev), or set {variable}"
    if found is None:
        raise BrokenError(f"no {' or '.join(chosen)}, which {needed}", remedy)
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's
    include = sysconfig.get_paths(scheme)["include"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, source)
        file.write_text("#include <Python.h>\nint main(void) { return 0; }\n")
        _output([found, "-c", f"-I{include}", str(file), "-o", f"{file}.o"], remedy)
    return found


def ncu() -> str:
    """Return the version of Nsight Compute.

    Raises:
        BrokenError: it is missing, or does not run.
    """
    remedy = "install Nsight Compute (of the CUDA toolkit), and put ncu on the PATH"
    if shutil.which("ncu") is None:
        raise BrokenError("no ncu on the PATH", remedy)
    return _output(["ncu", "--version"], remedy).splitlines()[-1]


def _counters() -> str:
    """Return who may read a GPU's counters, by the driver's parameter and our capabilities."""
    try:
        restricted = "RmProfilingAdminOnly: 1" in PARAMETERS.read_text()
        capable = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(), re.MULTILINE)
    except OSError as error:
        raise BrokenError(
            f"{error.filename}: {error.strerror}", "install NVIDIA's driver"
        ) from None
    if restricted and not (capable and int(capable[1], 16) & _SYS_ADMIN):
        raise BrokenError("the driver lets administrators alone read them", PERMIT)
    return "for administrators, of whom this is one" if restricted else "for everybody"


def _cache() -> str:
    """Return the cache's folder, where those of Triton and CuPy can be written too."""
    if environment.replaced:
        names = ", ".join(environment.replaced)
        what = f"the usual folder of {names} cannot be written"
        raise BrokenError(what, "set each to a folder that can be, or what is compiled is not kept")
    return _writable(files.cache(), "JETFIRE_CACHE")


def _writable(folder: Path, variable: str) -> str:
    if not environment.holds_files(folder):
        remedy = f"set {variable} to a folder that can be"
        raise BrokenError(f"{folder} cannot be written", remedy)
    return str(folder)


def _disk() -> str:
    folder = files.cache()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free at {place}"
    if free < LEAST_FREE:
        remedy = f"free {LEAST_FREE >> 30} GiB, or set JETFIRE_CACHE to a folder on another disk"
        raise BrokenError(text, remedy)
    return text


PARTS: dict[str, Callable[[], str]] = {
    "driver": _gpus,
    "CUDA": _cuda,
    "torch and Triton": _pair,
    "CuPy": _cupy,
    "NVRTC": _nvrtc,
    "C compiler": lambda: _compiles("CC", ("gcc", "clang"), "a.c", "Triton needs"),
    "C++ compiler": lambda: _compiles("CXX", ("c++",), "a.cpp", "launches without Python need"),
    "ncu": ncu,
    "counters": _counters,
    "cache": _cache,
    "profiles": lambda: _writable(profiles.user_folder(), "JETFIRE_PROFILES"),
    "disk": _disk,
}
