"""Compiles the C function and a binding of it, for setup.py and build_variant.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).resolve().parent
(MANIFEST_FILE,) = [*ROOT.glob("*/manifest.json"), *ROOT.glob("torch-ext/*/manifest.json")]
MANIFEST: dict[str, Any] = json.loads(MANIFEST_FILE.read_text())
ARCHITECTURE: str | None = MANIFEST["architecture"]  # None of compiled code


def toolkit() -> Path:
    """CUDA's folder: $CUDA_HOME, $CUDA_PATH, its usual place, or where nvcc is."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        places.append(str(Path(nvcc).resolve().parent.parent))
    for place in filter(None, places):
        if (Path(place) / "include" / "cuda.h").is_file():
            return Path(place)
    raise SystemExit("no CUDA toolkit: set CUDA_HOME to its folder")


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def compiler() -> list[object]:
    """What compiles a source of the function."""
    cuda = toolkit()
    if ARCHITECTURE is None:
        # It is C, whatever a file's suffix says.
        options = ["-xc", "-std=gnu17", "-O2", "-fPIC", f"-I{cuda / 'include'}"]
        return [os.environ.get("CC", "cc"), *options]
    target = f"-gencode=arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    nvcc = os.environ.get("NVCC", str(cuda / "bin" / "nvcc"))
    return [nvcc, "-O3", "-std=c++17", target, "-Xcompiler=-fPIC"]


def compile_source(source: str, folder: Path, newest: float) -> Path:
    """The object file; compiled where a source is newer."""
    made = folder / f"{Path(source).stem}.o"
    if not made.exists() or made.stat().st_mtime < newest:
        run(*compiler(), "-c", source, "-o", made)
    return made


def link(binding: str, made: Path, folder: Path, options: Sequence[str], libraries: str) -> None:
    """One shared object of a binding and the function, whose object files are kept in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    newest = max(file.stat().st_mtime for file in (ROOT / "csrc").iterdir())
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(lambda s: compile_source(s, folder, newest), MANIFEST["sources"]))
    headers = [ROOT / "csrc", sysconfig.get_path("include"), *include_paths()]
    command: list[object] = [os.environ.get("CXX", "c++"), "-O2", "-fPIC", "-shared", *options]
    command += [f"-I{header}" for header in headers]
    command += [binding, *objects, "-o", made]
    places: list[object] = list(library_paths())
    if ARCHITECTURE is not None:
        cuda = toolkit()
        places += [cuda / "lib64", cuda / "lib", *sorted(cuda.glob("targets/*/lib"))]
        libraries += " -lcudart_static -lrt"
    command += [f"-L{place}" for place in places]
    # CUDA's runtime and some compilers' libraries are linked in, apart from PyTorch's own.
    run(*command, *libraries.split(), "-ldl", "-lpthread", "-Wl,--exclude-libs,ALL")


def link_operator(binding: str, made: Path, folder: Path, options: Sequence[str] = ()) -> None:
    """The operator, on the interface of the manifest's PyTorch, whichever builds it."""
    major, minor = map(int, MANIFEST["torch"].split("."))
    stable = f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}{0:012x}"
    options = ["-std=c++17", stable, "-DPy_LIMITED_API=0x03090000", *options]
    # libtorch brings libtorch_cuda, where there is one, though nothing here names it.
    link(binding, made, folder, options, "-Wl,--no-as-needed -ltorch")


def link_development(made: Path, folder: Path) -> None:
    """The pybind11 binding."""
    name = made.name.partition(".")[0]
    options = ["-std=c++20", f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    libraries = "-lc10 -ltorch -ltorch_cpu -ltorch_python"
    link("csrc/pybind.cpp", made, folder, options, libraries)
